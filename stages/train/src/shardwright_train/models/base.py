"""The interface of a model family: stock modules of transformers, their sharding, inputs, outputs and description."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from pkgutil import resolve_name
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwright.io import BadInput
from shardwright.models.alike import unknown_type
from shardwright.models.config_keys import wrong_values
from shardwright.models.description import Contents, described_model, usual_length
from shardwright.models.facts import Family as Facts
from shardwright.models.mtp import mtp_depth
from shardwright.models.registry import FAMILIES, check_trained
from shardwright.types import EMBEDDING, HEAD, Attention, Model, Parameter, Strategy, base_type
from shardwright_train.data.objectives import Causal, Classification, Text
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.data.split import LossOn
from shardwright_train.models.configuration import check_only, check_sizes, parse
from shardwright_train.models.initial_weights import Filling, low_rank_fillings, with_low_rank
from shardwright_train.models.masks import Places, alibi_mask, alibi_slopes, mask_for, window_mask
from shardwright_train.models.mtp import FURTHER_LABELS, add_modules, join_modules
from shardwright_train.models.stock import Pieces, States, WithLoss, skeleton, stock_fillings, unstack
from shardwright_train.parallel.sharding_rules import OF_OUTPUTS, WORDS, Parts, Rule, cuts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import loss_in_chunks, loss_of_logits, token_embedding


class Family:
    """How a family's stock modules are sharded and called; one subclass per family, next to the family's facts.

    Subclasses must set the attributes without a value. Modules and parameters are named by their paths in the stock
    model.
    """

    embedding: tuple[str, ...]
    """Modules of the embedding, the token table first."""
    head: tuple[str, ...]
    """Modules of the head, the matrix that gives logits last."""
    plan: Mapping[str, str | Rule] = {}
    """Sharding rules by the ends of paths, in the words of transformers' plans; they add to that plan or replace it."""
    parts: Mapping[str, Parts]
    """Parts of each type of block."""
    counted_per_rank: tuple[str, ...] = ()
    """Attributes of stock modules that count heads or features; after sharding, each rank has its part of the count."""
    shared: Mapping[str, str] = {}
    """Parameters replicated in all blocks of a type, with their paths in the stock model."""
    normed_behind: tuple[str, ...] = ()
    """Types of block whose last one is followed by a norm of the stack."""
    kernel_names: Mapping[str, str] = {}
    """Names under which the stock model finds attention functions, by kernel; if absent, it is the kernel's name."""
    rotary: str | None = None
    """Path of the module that makes rotary cosines and sines."""
    objective: type[Text | Classification] = Causal
    """The objective, for families that do not let a run choose one; it also defines the inputs and labels."""
    objectives: Mapping[str, type[Text]] = {}
    """Objectives that a run may choose, with the same inputs and labels; the first is the default."""
    tokens: tuple[str, ...] = ("tokens",)
    """Tensors of a batch from which the embedding computes the states, in order."""
    auxiliary_loss: bool = False
    """Whether calls of blocks return auxiliary losses."""

    def __init__(self, facts: Facts, stock: Any) -> None:
        self.facts, self.stock = facts, stock

    # What a family may override.

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding of a batch at this rank's positions: rows of the table, through further modules."""
        table: Any = pieces.get_submodule(self.embedding[0])
        rows = (token_embedding(table, batch[name], pieces.tensor_parallel) for name in self.tokens)
        return tuple(pieces.through(self.embedding[1:], self.scaled(pieces.config, each)) for each in rows)

    def scaled(self, config: Any, rows: Tensor) -> Tensor:
        """Return rows of the embedding's table as the embedding scales them, before further modules."""
        return rows

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the input of the head's matrix at this rank's positions."""
        return pieces.through(self.head[:-1], states[-1])

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits of this rank's share of the classes."""
        logits: Tensor = pieces.get_submodule(self.head[-1])(inputs)
        return logits

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a copy of the block of a type with the given index in its list of blocks."""
        block: nn.Module = copy.deepcopy(stock.get_submodule(self.parts[kind].place(index)))
        return block

    def parts_of(self, kind: str, strategy: Strategy) -> Parts | None:
        """Return the parts of a type of block under a strategy; None for embedding and head."""
        return self.parts.get(kind)

    def units(self, kind: str, strategy: Strategy) -> Mapping[str, Strategy]:
        """Return the strategies of modules in a layer that are sharded differently from the layer.

        Modules are named by their paths in the layer, each before the modules inside it.
        """
        return {}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States | WithLoss:
        """Run a block on hidden states, with the mask and angles that it needs."""
        mask = mask_for(self.facts.attention.mask, states[0], batch, constants)
        arguments = constants["arguments"]
        if POSITIONS in batch and "every_angle" in constants:
            positions = batch[POSITIONS][:, constants["places"].computed]
            angles = tuple(each[positions] for each in constants["every_angle"])
            arguments = {**arguments, "position_embeddings": self.rotation(angles)}
        return (block(states[0], attention_mask=mask, **arguments),)

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return cosines and sines [1, s, features], or complex numbers, for a type of block at positions [1, s]."""
        angles: Any = rotary(example, positions)
        return angles if isinstance(angles, tuple) else (angles,)

    def rotation(self, angles: tuple[Tensor, ...]) -> Any:
        """Return the angles in the form that blocks expect: a pair of cosines and sines, or complex numbers."""
        return angles if len(angles) > 1 else angles[0]

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Divide the sizes that a stock block stores as attributes, after its matrices were sharded."""
        for module in block.modules():
            for name in self.counted_per_rank:
                if hasattr(module, name):
                    setattr(module, name, getattr(module, name) // tensor_parallel.size)

    def keeps_last_sum(self, kind: str, config: Any, compute: str) -> bool:
        """Return whether a block type's backward pass needs a value after the last sum, in a compute format."""
        facts = self.facts.of_type(kind, vars(config))
        return kind in self.normed_behind or "full" in facts.replays_sum(vars(config))

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the transformers configuration of a config.json."""
        return parse(self.stock.config_class, config, self.facts)

    def may_lack(self, model: Model, name: str) -> bool:
        """Return whether the tensor `name` of a file belongs to a part of the model that is not used here."""
        return False

    # What is the same for all families.

    def dropout(self, config: Any) -> float:
        """Return the highest dropout rate of a configuration."""
        return max((getattr(config, key) or 0.0 for key in self.facts.dropouts.keys), default=0.0)

    @property
    def plain_kernel(self) -> str:
        """The fastest attention kernel that needs no further package."""
        return (Attention.SDPA if Attention.SDPA in self.facts.kernels else Attention.EAGER).value

    def kernel_name(self, kernel: str) -> str:
        """Return the name under which the stock model finds the function of an attention kernel."""
        return self.kernel_names.get(kernel, kernel)

    def learns(self, model: Model) -> Text | Classification:
        """Return the default objective of a described model."""
        return self.objective.from_config(self.configuration(model), model.sequence_length)

    def trained_on(self, model: Model, asked: str | None, loss_on: LossOn | None = None) -> Text | Classification:
        """Return the objective that a run requests; raise BadInput if the model does not support it."""
        if asked is not None and asked not in self.objectives:
            raise BadInput(f"--objective {asked}", f"a {model.family} model does not support it", "leave it out")
        if loss_on is LossOn.COMPLETIONS and not (issubclass(self.objective, Text) and self.objective.learns_part):
            problem = f"a {model.family} model cannot be trained on completions only"
            raise BadInput("--loss-on completions", problem, "leave it out")
        if not self.objectives:
            learned = self.learns(model)
            return learned if loss_on is None or not isinstance(learned, Text) else replace(learned, loss_on=loss_on)
        name = asked or next(iter(self.objectives))
        try:
            return self.objectives[name].from_config(self.configuration(model), model.sequence_length)
        except ValueError as error:
            raise BadInput(
                f"--objective {name}", str(error), "describe another model, or choose another objective"
            ) from None

    def configuration(self, model: Model) -> Any:
        """Return the transformers configuration of a described model, with the described number of layers."""
        return self.configured(model.config | self.facts.counted(model.layers, model.config))

    def constants(
        self,
        model: Model,
        kind: str,
        places: Places,
        example: Tensor,
        kernel: str,
        heads: Callable[[int], slice] = slice,
    ) -> dict[str, Any]:
        """Return the constants of every pass through a described type of block: kernel, window, mask, angles.

        Cosines and sines are for the positions that this rank computes, in the dtype and on the device of `example`.
        `heads` returns this rank's share of a number of heads: by default all.
        """
        window, mask = model.types[kind].window, None
        if window is not None and kernel != Attention.FLASH_ATTENTION_2.value:
            mask = window_mask(places, window, example, self.facts.attention.mask)
        if sloped := model.types[kind].alibi_heads:
            mask = alibi_mask(places, alibi_slopes(sloped)[heads(sloped)], example)
        angles = self.rotated(model, kind, places, example)
        return {"kernel": kernel, "window": window, "places": places, "mask": mask, **angles}

    def rotated(self, model: Model, kind: str, places: Places, example: Tensor) -> dict[str, Any]:
        """Return the rotary arguments of a type of block, at this rank's positions and at all positions."""
        of_kind = self.facts.of_type(base_type(kind), self.facts.configured(model.config))
        if self.rotary is None or of_kind.attention.positions != "rope" or base_type(kind) in self.facts.merging:
            return {"arguments": {}}
        rotary = type(self.stock_model(model).get_submodule(self.rotary))(self.configuration(model))
        # Some kinds look at the length of the whole sequence, of which this rank may have a part.
        whole = torch.arange(model.sequence_length, device=example.device)[None]
        angles = self.angles(rotary.to(example.device), base_type(kind), example, whole)
        positions = places.positions(example.device)[places.computed]
        return {
            "arguments": {"position_embeddings": self.rotation(tuple(x[:, positions] for x in angles))},
            "every_angle": tuple(x[0] for x in angles),
        }

    def skeleton(self, config: Any) -> Any:
        """Return the stock model of a transformers configuration on the meta device.

        Each stacked matrix that the facts list as `stacked` is replaced by the separate matrices whose rows it holds.
        Raises ValueError if transformers cannot build the model.
        """
        stock = skeleton(self.stock, config)
        if self.facts.stock.stacked:
            read = self.facts.completed(self.facts.configured(vars(config)))
            layers = self.facts.layers(read)
            for number, kind in enumerate(layers):
                block = stock.get_submodule(f"{self.parts[kind].path}.{self.index(layers, number)}")
                unstack(block, self.facts.stock.stacked, {p.name: p.shape for p in self.facts.parameters(kind, read)})
        return stock

    def file_name(self, name: str) -> tuple[str, int]:
        """Return a parameter's name in files, by its Hugging Face name, and its index if it is stacked there."""
        module, _, kind = name.rpartition(".")
        for path, parts in self.facts.stock.stacked.items():
            for place, part in enumerate(parts):
                if module.endswith(f".{part}"):
                    return f"{module.removesuffix(part)}{path}.{kind}", place
        return name, 0

    def build(self, model: Model, layer: str, attention: str | None = None) -> nn.Module:
        """Return the stock modules of a layer (`embedding`, `layers[i]`, `head`) on the default device, uninitialized.

        `attention`: the kernel that they use, if they compute attention.
        """
        module = self._layer(model, layer, attention)
        device = torch.get_default_device()
        return module if device.type == "meta" else module.to_empty(device=device)

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Fill a whole layer with the initial weights of transformers."""
        with torch.no_grad():
            module.apply(self.stock_model(model)._init_weights)

    def fillings(self, model: Model, layer: str) -> Mapping[str, tuple[Filling, ...]]:
        """Return how transformers fills the parameters of a layer, by their names in its module."""
        module = self._stock_layer(model, layer)
        drawn = stock_fillings(module, lambda: self.initialize(model, module))
        return {**drawn, **low_rank_fillings(with_low_rank(module, model, layer), model)}

    def stock_model(self, model: Model, attention: str | None = None) -> Any:
        """Return the whole stock model of a description, without weights."""
        config, kernel = msgspec.json.encode(model.config), attention or self.plain_kernel
        return _cached_skeleton(self, config, model.layers, kernel, torch.get_default_dtype())

    def parameter_names(self, model: Model, layer: str) -> tuple[str, ...]:
        """Return the names of a layer's parameters in its module."""
        return tuple(name for name, _ in self._layer(model, layer).named_parameters())

    def _layer(self, model: Model, layer: str, attention: str | None = None) -> nn.Module:
        return with_low_rank(self._stock_layer(model, layer, attention), model, layer)

    def _stock_layer(self, model: Model, layer: str, attention: str | None = None) -> nn.Module:
        stock = self.stock_model(model, attention)
        module = self.module(stock, *self._place(model, layer))
        if depth_of(model, layer):
            join_modules(module, partial(self.scaled, stock.config))
        return module

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """The sharding rules by the ends of paths; parameters without a rule are replicated."""
        stock = {**(self.stock.config_class.base_model_tp_plan or {}), **(self.stock._tp_plan or {})}
        words = {path.rpartition("*.")[2]: word for path, word in {**stock, **self.plan}.items()}
        words = {path: word for path, word in words.items() if word not in OF_OUTPUTS}
        return {path: word if isinstance(word, Rule) else WORDS[word] for path, word in words.items()}

    def full_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return a parameter's full name, such as `model.layers.3.mlp.up_proj.weight`."""
        kind, index = self._place(model, layer)
        described = self.described_name(kind, parameter)
        return f"{self.parts[kind].place(index)}.{described}" if kind in self.parts else described

    def hugging_face_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return the stock model's name of a parameter, or of the parameter that it replicates."""
        kind, _ = self._place(model, layer)
        name = self.full_name(model, layer, parameter)
        if depth_of(model, layer):
            return self.copies(model).get(name, name)
        shared = self.shared.get(parameter) if kind in self.parts else None
        return name if shared is None else shared.format(kind=kind)

    def copies(self, model: Model) -> dict[str, str]:
        """Return the parameters of embedding and head that blocks have copies of, by the copies' full names.

        Files also have a copy of the head's matrix, which does not exist in runs.
        """
        found = dict[str, str]()
        for number, kind in enumerate(model.layers):
            if copies := model.types[kind].copies:
                path = f"{self.parts[base_type(kind)].place(self.index(model.layers, number))}."
                found |= {f"{path}{p.name}": str(p.copy_of) for p in copies}
                found[f"{path}shared_head.head.weight"] = f"{self.head[-1]}.weight"
        return found

    def index(self, layers: Sequence[str], number: int) -> int:
        """Return the index of a block in its list of the stock model, which may contain several types."""
        path, *before = (self.parts[base_type(kind)].path for kind in (layers[number], *layers[:number]))
        return before.count(path)

    def owner_name(self, model: Model, layer: str, parameter: str) -> str:
        """Return the Hugging Face name of a parameter, or of the parameter to which it is tied."""
        name = self.hugging_face_name(model, layer, parameter)
        return {tied: owner for owner, tied in model.tied}.get(name, name)

    def stock_names(self, model: Model) -> tuple[str, ...]:
        """Return the names of all parameters of the stock model, without buffers and tied copies."""
        blocks = ((f"layers[{i}]", kind) for i, kind in enumerate(model.layers))
        layers = ((EMBEDDING, EMBEDDING), *blocks, (HEAD, HEAD))
        parameters = ((name, p) for name, kind in layers for p in model.types[kind].parameters if not p.is_buffer)
        return tuple(dict.fromkeys(self.owner_name(model, name, p.name) for name, p in parameters))

    def described_name(self, kind: str, parameter: str) -> str:
        """Return the description's name of a layer's parameter, under which transformers stores it."""
        return self._stored.get(parameter, parameter)

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Return the head's parameters that are aliases of another parameter of the head."""
        pairs = (self.stock._tied_weights_keys or {}).items()
        return {tied: name for tied, name in pairs if not _within(name, self.embedding) and _within(tied, self.head)}

    def _place(self, model: Model, layer: str) -> tuple[str, int]:
        """Return the family's type of a layer, and its index in its list of blocks."""
        if layer in (EMBEDDING, HEAD):
            return layer, 0
        number = int(layer[len("layers[") : -1])
        return base_type(model.layers[number]), self.index(model.layers, number)

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer of a type, taken from a stock model."""
        if kind == EMBEDDING:
            return Pieces(stock, self.embedding, self.embed)
        return Pieces(stock, self.head, self._loss) if kind == HEAD else self.block(stock, kind, index)

    def _loss(self, pieces: Pieces, states: States, batch: Batch) -> Tensor:
        """Return the summed cross entropy []; with labels of further tokens, also of each depth [1 + depths]."""
        if FURTHER_LABELS not in batch:
            return self._cross_entropy(pieces, self.normed(pieces, states), batch["labels"])
        further = zip(states[1:], batch[FURTHER_LABELS].unbind(-1), strict=True)
        pairs = [(self.normed(pieces, states[:1]), batch["labels"]), *further]
        return torch.stack([self._cross_entropy(pieces, *pair) for pair in pairs])

    def _cross_entropy(self, pieces: Pieces, normed: Tensor, given: Tensor) -> Tensor:
        """Return the sum of cross entropy over the group's samples; under Ulysses, over this rank's positions."""
        matrix: Any = pieces.get_submodule(self.head[-1])
        labels = given.shape[1]
        # A class is predicted from the first position: ranks that split the sequence must first gather it.
        if not pieces.tensor_parallel.splits_sequence:
            normed = normed[:, :labels]
        with pieces.tensor_parallel.entered(normed) as (inputs,):
            inputs = inputs[:, :labels]
            if pieces.tensor_parallel.loss_chunks > 1:
                rest = tuple(matrix.parameters()), given, matrix.out_features, pieces.tensor_parallel
                return loss_in_chunks(partial(self.logits, pieces), inputs, *rest)
            logits = self.logits(pieces, inputs)
        return loss_of_logits(logits, given, matrix.out_features, pieces.tensor_parallel)


@lru_cache(maxsize=4)
def _cached_skeleton(
    family: Family, config: bytes, layers: tuple[str, ...], attention: str, _dtype: torch.dtype
) -> Any:
    described = msgspec.json.decode(config)
    configured = family.configured(described | family.facts.counted(layers, described))
    configured._attn_implementation = family.kernel_name(attention)
    stock = family.skeleton(configured)
    for number, kind in enumerate(layers):
        if depth := mtp_depth(kind):
            block = stock.get_submodule(family.parts[base_type(kind)].place(family.index(layers, number)))
            add_modules(block, stock.get_submodule(family.embedding[0]), stock.get_submodule(family.head[0]), depth)
    return stock


def depth_of(model: Model, layer: str) -> int:
    """Return the depth of a layer, by its name, if it predicts further tokens; 0 for all other layers."""
    return 0 if layer in (EMBEDDING, HEAD) else mtp_depth(model.layers[int(layer[len("layers[") : -1])])


def _within(parameter: str, paths: tuple[str, ...]) -> bool:
    return any(parameter.startswith(f"{path}.") for path in paths)


# Families by name: only the requested one is imported, here and from transformers.


def family_of(model: Model, file: object) -> Family:
    """Return the family of a described model; raise BadInput if it is not trained, or if there is none."""
    if model.is_traced:
        check_trained(model.family, file)
        made: Family = resolve_name(f"{__package__}.as_stock:as_stock")(model.family)
        return made
    return family_named(model.family, file)


def family_named(name: str, file: object) -> Family:
    """Return the family with a name; raise BadInput about `file` if there is none, or if it is not trained."""
    if name not in FAMILIES:
        raise unknown_type({"model_type": name}, file)
    check_trained(name, file)
    return _family(name)


@cache
def _family(name: str) -> Family:
    facts = FAMILIES[name]
    runtime: type[Family] = resolve_name(f"{__package__}.{facts.runtime}")
    module = facts.stock.module or name.replace("-", "_")
    return runtime(facts, resolve_name(f"transformers.models.{module}.modeling_{module}:{facts.stock.name}"))


# The planner's description of a model: its family's facts, and the parameters of its modules on the meta device.


def describe(family: Family, config: dict[str, Any], name: str, sequence_length: int | None) -> Model:
    """Describe the model of a config.json for samples of `sequence_length` tokens; None: the default length.

    Raises ValueError saying what in the configuration cannot be trained.
    """
    facts = family.facts
    if (wrong := wrong_values(facts, config)) is not None:
        raise ValueError(wrong)
    parsed = family.configured(config)
    check_only(config, facts)
    if sequence_length is None:
        sequence_length = usual_length(
            facts, facts.completed(facts.of_layer(EMBEDDING, facts.configured(vars(parsed))))
        )
    if sequence_length is None:
        raise BadInput("--sequence-length", "config.json does not state the sample length", "give it, in tokens")
    check_sizes(parsed, facts, sequence_length)
    stock = family.skeleton(parsed)
    family.objective.from_config(stock.config, sequence_length)
    read = facts.completed(facts.of_layer(EMBEDDING, facts.configured(vars(stock.config))))
    layers = facts.described_layers(read, sequence_length)

    def contents(layer: str) -> Contents:
        index = 0 if layer in (EMBEDDING, HEAD) else family.index(layers, layers.index(layer))
        module = family.module(stock, layer, index)
        return Contents(_parameters(family, layer, module), _products(module, facts))

    return described_model(facts, read, config, name, sequence_length, contents)


def _parameters(family: Family, layer: str, module: nn.Module) -> tuple[Parameter, ...]:
    return tuple(
        msgspec.structs.replace(
            cut.parameter,
            name=family.described_name(layer, cut.name),
            shared=layer in family.parts and cut.name in family.shared,
        )
        for cut in cuts(module, family.rules)
    )


def _products(module: nn.Module, facts: Facts) -> int:
    """Return the number of elements of a module's matrices, except for the router, which counts with its experts."""
    router = None if facts.experts is None else facts.experts.router
    bare = sum(p.numel() for name, p in module.named_parameters() if name in facts.stock.matrices)
    parts = (part for name, part in module.named_modules() if name != router)
    return bare + sum(p.weight.numel() for p in parts if isinstance(p, nn.Linear | nn.Conv1d | nn.Conv2d | Conv1D))
