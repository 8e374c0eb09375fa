"""What a model family is: stock modules of transformers, how they are cut, what goes in and what comes out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwright_formats.types.model import EMBEDDING, HEAD, BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright_formats.types.plan import Attention
from shardwright_train.parallel.sharding_rules import Parts, Rule, cuts
from shardwright_train.parallel.tensor import TensorParallel

__all__ = ["BLOCK", "Batch", "Family", "ImageForm", "States", "heads_of"]

BLOCK = "block"
"""The layer type of families that have one."""

Batch = dict[str, Tensor]
"""Inputs and `labels` of some samples, which are the first dim of each; labels that are IGNORED do not count."""
States = tuple[Tensor, ...]
"""What one layer hands to the next: tensors [samples, positions, features], as the description's `outputs` list."""

# In a config.json, but of no meaning for training.
_IGNORED_KEYS = {
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("gradient_checkpointing", "task_specific_params"),
}


class ImageForm(NamedTuple):
    """What images a model takes, and how many classes they are told into."""

    channels: int
    height: int
    width: int
    classes: int


class Family(ABC):
    """One subclass per family, in one file. What is None or empty here must be given there."""

    config_class: Any
    """The configuration class of transformers."""
    pretrained_class: Any
    """The class of transformers whose `_init_weights` gives initial weights."""
    counts: tuple[str, ...] = ("num_hidden_layers",)
    """The keys of the configuration that number the layers, one for each layer type."""
    other_keys: tuple[str, ...] = ()
    """Keys of a config.json that the configuration class takes without listing them."""
    rules: Mapping[str, Rule]
    """What tensor parallelism cuts, by the ends of modules' names; the others are held whole."""
    parts: Mapping[str, Parts]
    """The inside of each block type."""
    names: Mapping[str, Mapping[str, str] | str]
    """Hugging Face names: for embedding and head by attribute, for blocks a prefix with {} for the layer's number."""
    tied: tuple[tuple[str, str], ...] = ()
    """Parameters of embedding and head that are one where the configuration says tie_word_embeddings."""
    divided: tuple[str, ...] = ("num_attention_heads",)
    """Lengths in the configuration that tensor parallelism must divide."""
    divided_by_ulysses: Mapping[str, tuple[str, ...] | Mapping[str, int]] = {BLOCK: ("num_attention_heads",)}
    """What the Ulysses degree must divide, by layer type: lengths in the configuration, or lengths that are fixed."""
    shared: tuple[str, ...] = ()
    """Ends of names of parameters that all layers of a type hold copies of."""
    kernels: tuple[Attention, ...] = (Attention.SDPA, Attention.FLASH_ATTENTION_2, Attention.EAGER)
    """The attention kernels that its blocks can use; flash_attention_2 adds nothing to the scores."""

    # What every family says.

    @abstractmethod
    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """The embedding, the head, or the block of a type with number `index` among those of its type."""

    @abstractmethod
    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block."""

    # What most families leave as it is.

    def check(self, config: Any, sequence_length: int) -> None:
        """Raise ValueError saying what in a configuration cannot be trained."""
        if sequence_length > config.max_position_embeddings:
            raise ValueError(f"sequence length {sequence_length} is over {config.max_position_embeddings} positions")

    def constants(self, config: Any, kind: str, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """What every pass through a block of a type needs besides states and batch, for the positions of this rank."""
        return {}

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:  # noqa: B027 (most: nothing)
        """Correct what a stock block remembers of its whole size."""

    def dropout(self, config: Any) -> float:
        """The highest dropout rate of a configuration."""
        return 0.0

    def outputs(self, config: Any, sequence_length: int) -> tuple[BoundaryTensor, ...]:
        """What crosses from each layer to the next."""
        hidden: int = config.hidden_size
        return (BoundaryTensor(name="hidden_states", sequence_length=sequence_length, features=hidden),)

    def attention_positions(self, kind: str, sequence_length: int) -> int:
        """Positions of keys that each position of a block attends to, all its attentions together."""
        return sequence_length

    def regions(self, kind: str, config: Any) -> tuple[Region, ...]:
        """Where tensor parallelism communicates in a layer; here as in a language model of pre-norm blocks."""
        hidden = "hidden_states"
        if kind == EMBEDDING:
            return (Region(name="lookup", leaves=hidden),)
        if kind == HEAD:
            return (Region(name="logits", enters=(hidden,)),)
        replays: Any = self.replays_sum(config)
        heads = heads_of(config, hidden, hidden)
        attention = Region(name="attention", enters=(hidden,), leaves=hidden, attention=heads, replays_sum=replays)
        return attention, Region(name="mlp", enters=(hidden,), leaves=hidden, replays_sum=replays)

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """The kinds of recomputation whose end is not a region's sum: a dropout or norm behind it keeps something."""
        return ()

    def labels(self, sequence_length: int) -> int:
        """Positions of a sample that the head computes a loss for."""
        return sequence_length

    def computed_positions(self, kind: str, sequence_length: int) -> int:
        """Positions that the matrices of a layer are applied to."""
        return sequence_length

    def image_form(self, model: Model) -> ImageForm:
        """What images a family of images takes."""
        raise NotImplementedError

    def stream_tokens(self, sequence_length: int) -> int | None:
        """How many tokens of a text a sample takes (one more is read, as the last label); None: it is no text."""
        return sequence_length

    def batch(self, model: Model, samples: Tensor, generator: torch.Generator) -> Batch:
        """Inputs and labels of samples [n, stream_tokens + 1] of a text; here each token labels the one before."""
        return {"tokens": samples[:, :-1], "labels": samples[:, 1:]}

    def random_batch(self, model: Model, samples: int, generator: torch.Generator) -> Batch:
        """As `batch`, on random tokens."""
        length = self.stream_tokens(model.sequence_length)
        assert length is not None
        text = torch.randint(0, model.config["vocab_size"], (samples, length + 1), generator=generator)
        return self.batch(model, text, generator)

    def hugging_face_name(self, model: Model, layer: str, parameter: str) -> str:
        """The name in the stock model of what a parameter is, or is a copy of."""
        return self.full_name(model, layer, parameter)

    # What is the same for all.

    def describe(self, family: str, config: dict[str, Any], name: str, sequence_length: int) -> Model:
        """The model as the planner sees it, read off its modules on the meta device.

        Raises ValueError saying what in the configuration cannot be trained.
        """
        known = set(self.config_class().to_dict()) | set(self.config_class.attribute_map) | _IGNORED_KEYS
        known |= set(self.other_keys)
        if unknown := sorted(set(config) - known):
            raise ValueError(f"unknown key {unknown[0]!r} for a {family} model")
        parsed = self._parsed(config)
        self.check(parsed, sequence_length)
        layers = self.layers(parsed)
        aliases = {short for short, long in self.config_class.attribute_map.items() if long in self.counts}
        aliases |= {long for short, long in self.config_class.attribute_map.items() if short in self.counts}
        return Model(
            name=name,
            family=family,
            config={k: v for k, v in config.items() if k not in (*self.counts, *aliases)},
            sequence_length=sequence_length,
            layers=layers,
            types={
                kind: self._described(parsed, kind, sequence_length)
                for kind in (EMBEDDING, *dict.fromkeys(layers), HEAD)
            },
            tied=self.tied if self.tied and parsed.tie_word_embeddings else (),
        )

    def layers(self, config: Any) -> tuple[str, ...]:
        """The type of each block, in order."""
        return tuple(
            kind for kind, key in zip(self.parts, self.counts, strict=True) for _ in range(getattr(config, key))
        )

    def configuration(self, model: Model) -> Any:
        """The transformers configuration of a described model, number of layers included."""
        counts = {key: model.layers.count(kind) for kind, key in zip(self.parts, self.counts, strict=True)}
        return self._parsed(model.config | counts)

    def build(self, model: Model, layer: str, attention: str) -> nn.Module:
        """The stock modules of a layer (`embedding`, `layers[i]`, `head`), on the default device."""
        config = self.configuration(model)
        config._attn_implementation = attention
        kind, index = _place(model, layer)
        return self.make(kind, config, index)

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Give a whole layer the initial weights that transformers gives it."""
        with torch.no_grad():
            module.apply(self.pretrained_class(self.configuration(model))._init_weights)

    def full_name(self, model: Model, layer: str, parameter: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` and the like."""
        kind, index = _place(model, layer)
        named = self.names[kind]
        return named.format(index) + parameter if isinstance(named, str) else _renamed(parameter, named)

    def described_name(self, layer: str, parameter: str) -> str:
        """What the model description calls a parameter of a layer."""
        named = self.names.get(layer)
        return parameter if named is None or isinstance(named, str) else _renamed(parameter, named)

    def _parsed(self, config: dict[str, Any]) -> Any:
        return self.config_class(**{key: value for key, value in config.items() if key not in _IGNORED_KEYS})

    def _described(self, config: Any, kind: str, sequence_length: int) -> LayerType:
        with torch.device("meta"):
            module = self.make(kind, config, 0)
        inside = kind in self.parts
        attention = self.attention_positions(kind, sequence_length) if inside else 0
        flops = _forward_flops(module, config, attention) * self.computed_positions(kind, sequence_length)
        return LayerType(
            parameters=tuple(
                Parameter(
                    name=self.described_name(kind, cut.name),
                    shape=cut.shape,
                    tp_dim=cut.tp_dim,
                    inside=cut.inside,
                    shared=inside and cut.name.endswith(self.shared),
                )
                for cut in cuts(module, self.rules)
            ),
            forward_flops_per_sample=flops,
            tp_must_divide=_lengths(config, self.divided) if inside else {},
            ulysses_must_divide=_lengths(config, self.divided_by_ulysses.get(kind, ())),
            outputs=() if kind == HEAD else self.outputs(config, sequence_length),
            regions=self.regions(kind, config),
            labels=self.labels(sequence_length) if kind == HEAD else 0,
        )


def heads_of(config: Any, queries: str, keys: str) -> Heads:
    """The heads of a configuration's attention between two boundary tensors."""
    heads = config.num_attention_heads
    return Heads(
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_features=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _place(model: Model, layer: str) -> tuple[str, int]:
    """The layer type of a layer, and its number among those of its type."""
    if layer in (EMBEDDING, HEAD):
        return layer, 0
    number = int(layer[len("layers[") : -1])
    return model.layers[number], model.layers[:number].count(model.layers[number])


def _lengths(config: Any, named: tuple[str, ...] | Mapping[str, int]) -> dict[str, int]:
    return dict(named) if isinstance(named, Mapping) else {name: getattr(config, name) for name in named}


def _renamed(parameter: str, prefixes: Mapping[str, str]) -> str:
    longest = max((key for key in prefixes if f"{parameter}.".startswith(f"{key}.")), key=len)
    return prefixes[longest] + parameter[len(longest) :]


def _forward_flops(module: nn.Module, config: Any, attention_positions: int) -> int:
    """Of one position: 2 per weight of a matrix, and 4 per hidden feature of the heads and position attended to."""
    matrices = (m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d | Conv1D))
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: int = 4 * attention_positions * head_width * config.num_attention_heads
    return 2 * sum(m.weight.numel() for m in matrices) + attention
