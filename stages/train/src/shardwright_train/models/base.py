"""What a model family is: stock modules of transformers, how they are cut, what goes in and what comes out."""

import copy
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.model import EMBEDDING, HEAD, Model
from shardwright_formats.types.plan import Attention
from shardwright_train.data.boundaries import POSITIONS
from shardwright_train.data.objectives import Causal, Classification, Text
from shardwright_train.data.share import Batch
from shardwright_train.models.configuration import Only, parse
from shardwright_train.models.initial_weights import Filling
from shardwright_train.models.masks import Mask, mask_for
from shardwright_train.models.stock import Pieces, skeleton
from shardwright_train.models.stock_weights import stock_fillings
from shardwright_train.parallel.sharding_rules import WORDS, Parts, Rule
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import loss_of_logits, token_embedding

BLOCK = "block"
"""The layer type of families that have one."""

States = tuple[Tensor, ...]
"""What one layer hands to the next: tensors [samples, positions, features], as the description's `outputs` list."""


class Family:
    """One subclass per family, in one file. What has no value here must be given there.

    Modules and parameters are named by their paths in the stock model.
    """

    embedding: tuple[str, ...]
    """The modules of the embedding, the token table first."""
    head: tuple[str, ...]
    """The modules of the head, the matrix that gives logits last."""
    plan: Mapping[str, str | Rule] = {}
    """What tensor parallelism cuts where transformers has no plan: by the ends of paths, in the words of its plans."""
    parts: Mapping[str, Parts]
    """Each type of block."""
    divided: tuple[str, ...] = ("num_attention_heads", "intermediate_size")
    """Lengths in the configuration that tensor parallelism must divide: first the heads, which Ulysses divides, too."""
    undivided: Mapping[str, str] = {}
    """What tensor parallelism cannot divide, by layer type: one rank has all of it."""
    undivided_by_ulysses: Mapping[str, str] = {}
    """The same of Ulysses."""
    counted_per_rank: tuple[str, ...] = ()
    """Attributes of stock modules that count heads or features, of which each rank has its share."""
    shared: Mapping[str, str] = {}
    """Parameters of blocks that all layers of a type hold replicas of, and where the stock model has them."""
    only: Mapping[str, Only] = {}
    """Keys of the configuration of which but one value can be trained."""
    own_keys: tuple[str, ...] = ()
    """Keys of a config.json that mean something here, or nothing, and that transformers does not list."""
    dropouts: tuple[str, ...] = ()
    """The dropout rates of the configuration, that of the hidden states last."""
    ends_in_dropout: tuple[str, ...] = ()
    """The kinds of recomputation whose end is such a dropout of hidden states, which keeps its mask."""
    mask: Mask = Mask.CAUSAL
    """What its attention leaves out."""
    normed_behind: tuple[str, ...] = ()
    """Types of block behind the last of which comes a norm of the stack."""
    rotary: str | None = None
    """The module that makes rotary cosines and sines."""
    objective: type[Text | Classification] = Causal
    """What it learns, where a run cannot choose, and what its inputs and labels are counted by."""
    objectives: Mapping[str, type[Text]] = {}
    """What a run may choose to learn, of the same inputs and labels; the first where it names none."""
    kernels: tuple[Attention, ...] = tuple(kernel for kernel in Attention if kernel is not Attention.AUTO)
    """The attention kernels that its blocks can use; flash_attention_2 adds nothing to the scores."""
    states: Mapping[str, str] = {"hidden_states": "tokens"}
    """What crosses from each layer to the next, for each type of block in order, and the tokens that it begins with."""

    def __init__(self, name: str, stock: Any) -> None:
        self.name, self.stock = name, stock

    # What families say beside that.

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """What the embedding makes of a batch, at this rank's positions: the table's rows, through the others."""
        table: Any = pieces.get_submodule(self.embedding[0])
        rows = (token_embedding(table, batch[name], pieces.tensor_parallel) for name in self.states.values())
        return tuple(pieces.through(self.embedding[1:], each) for each in rows)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """What the matrix of the head is applied to, at this rank's positions."""
        return pieces.through(self.head[:-1], states[-1])

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """The block of a type with number `index` among those of its type."""
        block: nn.Module = copy.deepcopy(stock.get_submodule(f"{self.parts[kind].path}.{index}"))
        return block

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block."""
        mask = mask_for(self.mask, states[0], batch, constants["kernel"])
        arguments = constants["arguments"]
        if POSITIONS in batch and "every_angle" in constants:
            own = batch[POSITIONS][:, constants["positions"]]
            arguments = {"position_embeddings": tuple(angles[own] for angles in constants["every_angle"])}
        return (block(states[0], attention_mask=mask, **arguments),)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Correct what a stock block remembers of its whole size."""
        for module in block.modules():
            for name in self.counted_per_rank:
                if hasattr(module, name):
                    setattr(module, name, getattr(module, name) // tensor_parallel.size)

    def keys(self, kind: str) -> tuple[str, ...]:
        """The states whose positions each attention of a block attends to: its type's own, then those before."""
        names, number = tuple(self.states), list(self.parts).index(kind) if kind in self.parts else 0
        return names[number::-1]

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """The kinds of recomputation whose end is not a region's sum: a dropout or norm behind it keeps something."""
        return self.ends_in_dropout if self.dropouts and getattr(config, self.dropouts[-1]) > 0 else ()

    def keeps_last_sum(self, kind: str, config: Any) -> bool:
        """Whether something behind the last sum of a block of a type is kept for the backward pass."""
        return kind in self.normed_behind or "full" in self.replays_sum(config)

    def configured(self, config: Mapping[str, Any]) -> Any:
        """The transformers configuration of a config.json."""
        return parse(self.stock.config_class, config, self.name, self.own_keys)

    # What is the same for all.

    def dropout(self, config: Any) -> float:
        """The highest dropout rate of a configuration."""
        return max((getattr(config, key) or 0.0 for key in self.dropouts), default=0.0)

    def learns(self, model: Model) -> Text | Classification:
        """What the samples of a described model are."""
        return self.objective.of(self.configuration(model), model.sequence_length)

    def trained_on(self, model: Model, asked: str | None) -> Text | Classification:
        """What the samples of a run are that asks for this objective; BadInput where the model has none such."""
        if asked is not None and asked not in self.objectives:
            raise BadInput(f"--objective {asked}", f"a {self.name} model is not trained so", "leave it out")
        if not self.objectives:
            return self.learns(model)
        name = asked or next(iter(self.objectives))
        try:
            return self.objectives[name].of(self.configuration(model), model.sequence_length)
        except ValueError as error:
            raise BadInput(f"--objective {name}", str(error), "describe another model, or train otherwise") from None

    def configuration(self, model: Model) -> Any:
        """The transformers configuration of a described model, number of layers included."""
        return self.configured(
            model.config | {parts.counted_by: model.layers.count(kind) for kind, parts in self.parts.items()}
        )

    def constants(self, model: Model, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """What every pass through a block needs besides states and batch: the kernel, and rotary cosines and sines.

        Those are of the positions of this rank, in the dtype and on the device of `example`.
        """
        if self.rotary is None:
            return {"kernel": kernel, "arguments": {}}
        rotary = type(self._skeleton(model, Attention.SDPA.value).get_submodule(self.rotary))(self.configuration(model))
        # Some kinds look at the length of the whole sequence, of which this rank may have a part.
        whole = torch.arange(model.sequence_length, device=example.device)[None]
        every = rotary.to(example.device)(example, whole)
        angles = tuple(x[:, positions].clone() for x in every)
        more = {"every_angle": tuple(x[0] for x in every), "positions": positions}
        return {"kernel": kernel, "arguments": {"position_embeddings": angles}, **more}

    def build(self, model: Model, layer: str, attention: str) -> nn.Module:
        """The stock modules of a layer (`embedding`, `layers[i]`, `head`), on the default device, without weights."""
        module = self.module(self._skeleton(model, attention), *_place(model, layer))
        device = torch.get_default_device()
        return module if device.type == "meta" else module.to_empty(device=device)

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Give a whole layer the initial weights that transformers gives it."""
        with torch.no_grad():
            module.apply(self._skeleton(model, Attention.SDPA.value)._init_weights)

    def fillings(self, model: Model, layer: str) -> Mapping[str, tuple[Filling, ...]]:
        """What transformers fills the parameters of a layer with, by their names in its module."""
        with torch.device("meta"):
            module = self.build(model, layer, Attention.SDPA.value)
        return stock_fillings(module, lambda: self.initialize(model, module))

    def stock_model(self, model: Model) -> Any:
        """The whole stock model of a description, without weights."""
        return self._skeleton(model, Attention.SDPA.value)

    def parameter_names(self, model: Model, layer: str) -> tuple[str, ...]:
        """The parameters of a layer, by their names in its module."""
        module = self.module(self.stock_model(model), *_place(model, layer))
        return tuple(name for name, _ in module.named_parameters())

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """What tensor parallelism cuts, by the ends of paths; the others are replicated."""
        stock = {**(self.stock.config_class.base_model_tp_plan or {}), **(self.stock._tp_plan or {})}
        words = {path.rpartition("*.")[2]: word for path, word in {**stock, **self.plan}.items()}
        return {path: word if isinstance(word, Rule) else WORDS[word] for path, word in words.items()}

    def full_name(self, model: Model, layer: str, parameter: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` and the like."""
        kind, index = _place(model, layer)
        described = self.described_name(kind, parameter)
        return f"{self.parts[kind].path}.{index}.{described}" if kind in self.parts else described

    def hugging_face_name(self, model: Model, layer: str, parameter: str) -> str:
        """The name in the stock model of what a parameter is, or is a replica of."""
        kind, _ = _place(model, layer)
        shared = self.shared.get(parameter) if kind in self.parts else None
        return self.full_name(model, layer, parameter) if shared is None else shared.format(kind=kind)

    def owner_name(self, model: Model, layer: str, parameter: str) -> str:
        """The same, where the head's tied matrices have the names of the embedding's, as in the stock model."""
        name = self.hugging_face_name(model, layer, parameter)
        return {tied: own for own, tied in model.tied}.get(name, name)

    def stock_names(self, model: Model) -> tuple[str, ...]:
        """All parameters of the stock model."""
        layers = (
            (EMBEDDING, EMBEDDING),
            *((f"layers[{i}]", kind) for i, kind in enumerate(model.layers)),
            (HEAD, HEAD),
        )
        names = (self.owner_name(model, name, p.name) for name, kind in layers for p in model.types[kind].parameters)
        return tuple(dict.fromkeys(names))

    def described_name(self, kind: str, parameter: str) -> str:
        """What the model description calls a parameter of a layer: what transformers stores it as."""
        return self._stored.get(parameter, parameter)

    @property
    def counts(self) -> tuple[str, ...]:
        """The keys of the configuration that number the layers, one for each type."""
        return tuple(parts.counted_by for parts in self.parts.values())

    @cached_property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """Parameters of embedding and head that are one where the configuration says tie_word_embeddings."""
        pairs = (self.stock._tied_weights_keys or {}).items()
        return tuple((own, tied) for tied, own in pairs if _within(own, self.embedding) and _within(tied, self.head))

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Parameters of the head that are one with another name of the head."""
        pairs = (self.stock._tied_weights_keys or {}).items()
        return {tied: own for tied, own in pairs if not _within(own, self.embedding) and _within(tied, self.head)}

    def _skeleton(self, model: Model, attention: str) -> Any:
        config = msgspec.json.encode(model.config)
        return _cached_skeleton(self, config, model.layers, attention, torch.get_default_dtype())

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """The modules of a layer of a type, taken out of a stock model."""
        if kind == EMBEDDING:
            return Pieces(stock, self.embedding, self.embed)
        return Pieces(stock, self.head, self._loss) if kind == HEAD else self.block(stock, kind, index)

    def _loss(self, pieces: Pieces, states: States, batch: Batch) -> Tensor:
        """The sum of cross entropy over the group's samples; of this rank's own positions under Ulysses."""
        matrix: Any = pieces.get_submodule(self.head[-1])
        with pieces.tensor_parallel.entered(self.normed(pieces, states)) as (inputs,):
            # A class is told from the first position.
            logits = matrix(inputs[:, : batch["labels"].shape[1]])
        return loss_of_logits(logits, batch["labels"], matrix.out_features, pieces.tensor_parallel)


@lru_cache(maxsize=4)
def _cached_skeleton(
    family: Family, config: bytes, layers: tuple[str, ...], attention: str, _dtype: torch.dtype
) -> Any:
    counts = {parts.counted_by: layers.count(kind) for kind, parts in family.parts.items()}
    configured = family.configured(msgspec.json.decode(config) | counts)
    configured._attn_implementation = attention
    return skeleton(family.stock, configured)


def _place(model: Model, layer: str) -> tuple[str, int]:
    """The layer type of a layer, and its number among those of its type."""
    if layer in (EMBEDDING, HEAD):
        return layer, 0
    number = int(layer[len("layers[") : -1])
    return model.layers[number], model.layers[:number].count(model.layers[number])


def _within(parameter: str, paths: tuple[str, ...]) -> bool:
    return any(parameter.startswith(f"{path}.") for path in paths)
