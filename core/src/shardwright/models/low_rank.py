"""Low-rank adaptation (LoRA, Hu et al. 2021) of a described model, as an adapter of peft specifies it.

Each matrix W [outputs, inputs] that the adapter names gets A [rank, inputs] and B [outputs, rank]; only these are
trained. If tensor parallelism splits W over its outputs, B is split in the same way, and A is a replica that is applied
inside the region. If it splits W over its inputs, A is split in the same way, and B is the replica: what B A adds is
then a part of the same sum over the ranks as W's result. If W is a replica inside a region, so are A and B.

Experts' matrices are one parameter [experts, outputs, inputs], which gets A [experts, rank, inputs] and B [experts,
outputs, rank].
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.adapter_config import Adapter
from shardwright.models.description import multiplied_positions
from shardwright.models.frozen import Place, freeze_where, layers_of
from shardwright.models.low_rank_targets import (
    DOWN,
    GATE_UP,
    ROUTER,
    Expression,
    Selection,
    check_expressions,
    expert_keys,
    matched_names,
    paths_of,
    selected,
)
from shardwright.models.registry import TRACED_TOWERS, facts_of
from shardwright.types.model import EMBEDDING, HEAD, LOW_RANK, LayerType, Model, Parameter, base_type

FIRST, SECOND = f"{LOW_RANK}A.weight", f"{LOW_RANK}B.weight"
"""Ends of the names of A and B, after the name of their module."""
LOW_RANK_KERNELS = 4
"""Number of kernels of a low-rank pair in a forward pass: two matrix products, the scaling and the sum."""
_EXPERTS = "mlp.experts"
_INNER = ".base_layer"
"""What peft appends to a module's name for the module's first parameter, if two of its parameters are adapted."""
_DOUBLED = r".*\.gate_up_proj"
"""peft's pattern for the experts' first matrices, which are two matrices side by side."""

_T = TypeVar("_T", int, float)


class Pair(NamedTuple):
    """The low-rank matrices of one matrix."""

    module: str
    """The name in the layer of the module to which they belong in peft's files."""
    matrix: str
    """The name of the matrix in the layer."""
    is_parameter: bool
    """Whether peft adapts the matrix as a parameter instead of as a module."""
    rank: int

    @property
    def target(self) -> str:
        """Return peft's name of the target in the layer: a parameter, or a module."""
        return self.matrix if self.is_parameter else self.module


def adapt(model: Model, adapter: Adapter, file: object) -> Model:
    """Return the model with the low-rank matrices that the adapter specifies, and everything else frozen.

    Raises BadInput, naming `file`, if a target is not a module of the model, or cannot have low-rank matrices.
    """
    if model.family in TRACED_TOWERS:
        problem = f"low-rank matrices are not supported for {model.family}, whose towers are not described by module"
        raise BadInput(file, problem, "leave out --lora")
    if _is_frozen_on_request(model):
        raise BadInput(file, "parts of the model are already frozen", "pass only one of --frozen and --lora")
    ends = map(_end, (*adapter.ranks, *adapter.alphas))
    check_expressions((*adapter.targets.expressions, *ends), matched_names(model), file)
    selection = selected(model, adapter.targets, file)
    if selection.doubled:
        ranks = {**adapter.ranks, _DOUBLED: 2 * adapter.low_rank.rank}
        adapter = adapter._replace(ranks=ranks, alphas={**adapter.alphas, _DOUBLED: 2 * adapter.low_rank.alpha})
    types, layers, alphas = dict[str, LayerType](), dict[Place, str](), dict[str, float]()
    made, paths = dict[tuple[str, tuple[Pair, ...]], str](), paths_of(model)
    for place, kind in layers_of(model):
        pairs = tuple(_pairs(model, place, paths[place], selection, adapter))
        alphas |= {f"{paths[place]}{pair.target}": _alpha(adapter, f"{paths[place]}{pair.target}") for pair in pairs}
        if (name := made.get((kind, pairs))) is None:
            name = kind if not pairs or kind in (EMBEDDING, HEAD) else f"{kind}.{len(made)}"
            made[kind, pairs], types[name] = name, _adapted(model, kind, pairs)
        layers[place] = name
    others = {name: alpha for name, alpha in alphas.items() if alpha != adapter.low_rank.alpha}
    low_rank = replace(adapter.low_rank, alphas=others or UNSET)
    blocks = tuple(layers[number] for number in range(len(model.layers)))
    extended = replace(model, layers=blocks, types=types, low_rank=low_rank)
    return freeze_where(extended, lambda _, parameter: LOW_RANK not in parameter.name, file)


def _is_frozen_on_request(model: Model) -> bool:
    """Return whether parameters are frozen on request, in addition to parameters that the family never trains."""
    if model.is_traced:
        return any(kind != base_type(kind) for kind in model.layers)
    facts, config = facts_of(model), _config(model)
    kinds = (EMBEDDING, *dict.fromkeys(map(base_type, model.layers)), HEAD)
    never = {p.name for kind in kinds for p in facts.parameters(kind, config) if not p.trained}
    frozen = {p.name for kind in model.types.values() for p in kind.parameters if not p.trained}
    return not frozen <= never


def _config(model: Model) -> Mapping[str, Any]:
    """Return the configuration of a described model, with derived keys."""
    facts = facts_of(model)
    config = facts.configured(model.config | facts.counted(model.layers, model.config))
    return facts.completed(facts.of_layer(EMBEDDING, config))


def _alpha(adapter: Adapter, name: str) -> float:
    return _matched(adapter.alphas, name, adapter.low_rank.alpha)


def _pairs(model: Model, place: Place, path: str, selection: Selection, adapter: Adapter) -> Iterator[Pair]:
    """Yield the low-rank pairs of a layer, in the order of its parameters."""
    experts, rank = expert_keys(model), adapter.low_rank.rank
    for module, name in selection.modules.get(place, {}).items():
        yield Pair(module, f"{module}.weight", False, _matched(adapter.ranks, name, rank))
    if isinstance(place, str) or experts is None or base_type(model.layers[place]) not in experts.types:
        return
    first, last = (f"{_EXPERTS}.{each}" for each in (GATE_UP, DOWN))
    inner = _EXPERTS + _INNER if DOWN in selection.parameters else _EXPERTS
    held = {GATE_UP: (inner, first), DOWN: (_EXPERTS, last), ROUTER: (experts.router, f"mlp.{ROUTER}")}
    for parameter, (module, matrix) in held.items():
        if parameter in selection.parameters:
            yield Pair(module, matrix, True, _matched(adapter.ranks, f"{path}{matrix}", rank))


def _matched(patterns: Mapping[str, _T], name: str, otherwise: _T) -> _T:
    """Return the value of the first pattern that matches the end of a name, as peft does."""
    return next((x for pattern, x in patterns.items() if _end(pattern).match(name)), otherwise)


def _end(pattern: str) -> Expression:
    return Expression(pattern, rf"(.*\.)?({pattern})$")


def _adapted(model: Model, kind: str, pairs: tuple[Pair, ...]) -> LayerType:
    """Return a layer type with low-rank matrices after the last parameter of each adapted module."""
    described = model.types[kind]
    weights = {p.name: p for p in described.parameters}
    added, products = dict[str, list[Parameter]](), 0
    for pair in pairs:
        weight = weights[pair.matrix]
        matrices = _matrices(pair, weight, _outputs_last(model) and kind not in (EMBEDDING, HEAD))
        owner = pair.matrix.rpartition(".")[0]
        added.setdefault([name for name in weights if name.rpartition(".")[0] == owner][-1], []).extend(matrices)
        used, held = (1, 1) if described.experts is UNSET or weight.ep_dim is UNSET else _used(described)
        products += sum(p.numel(1) for p in matrices) // held * used
    parameters = (each for p in described.parameters for each in (p, *added.get(p.name, ())))
    flops, traced = 2 * products * _multiplied(model, base_type(kind)), described.traced
    if traced is not UNSET:
        given = sum(p.numel(1) // p.shape[-1] for each in added.values() for p in each)
        traced = replace(
            traced,
            product_flops=traced.product_flops + flops,
            multiplied=traced.multiplied + products,
            kept=traced.kept + sum(pair.rank for pair in pairs) * model.sequence_length,
            products=traced.products + given * model.sequence_length,
            kernels=traced.kernels + LOW_RANK_KERNELS * len(pairs),
        )
    operations = described.forward_flops_per_sample + flops
    return replace(described, parameters=tuple(parameters), forward_flops_per_sample=operations, traced=traced)


def _multiplied(model: Model, layer: str) -> int:
    """Return the number of positions per sample that low-rank matrices of a layer type multiply."""
    if model.is_traced:
        return model.sequence_length
    facts = facts_of(model)
    return multiplied_positions(facts, facts.of_layer(layer, _config(model)), layer, model.sequence_length)


def _outputs_last(model: Model) -> bool:
    """Return whether matrices of blocks are [inputs, outputs]; False if traced, as traces contain only Linears."""
    return not model.is_traced and facts_of(model).stock.outputs_last


def _used(kind: LayerType) -> tuple[int, int]:
    """Return how many experts of a block a position uses, and how many the block has."""
    assert kind.experts is not UNSET
    return kind.experts.top_k, kind.experts.number


def _matrices(pair: Pair, weight: Parameter, outputs_last: bool) -> tuple[Parameter, Parameter]:
    """Return A and B of a matrix; one of them is sharded as the matrix is.

    For a matrix [..., outputs, inputs], in which everything except the inputs may be several dims, they are A [...,
    rank, inputs] and B [..., outputs, rank].
    """
    experts = weight.shape[:1] if weight.ep_dim is not UNSET else ()
    outputs, inputs = (weight.shape[1:], weight.shape[0]) if outputs_last else (weight.shape[:-1], weight.shape[-1])
    by_inputs = weight.tp_dim == (0 if outputs_last else len(weight.shape) - 1)
    cut = None if weight.tp_dim is None or by_inputs else weight.tp_dim - outputs_last
    first = Parameter(
        name=f"{pair.module}{FIRST}",
        shape=(*experts, pair.rank, inputs),
        tp_dim=len(experts) + 1 if by_inputs else None,
        inside=cut is not None or weight.inside,
        ep_dim=weight.ep_dim,
    )
    second = Parameter(
        name=f"{pair.module}{SECOND}",
        shape=(*outputs, pair.rank),
        tp_dim=cut,
        inside=by_inputs or weight.inside,
        ep_dim=weight.ep_dim,
    )
    return first, second


def pairs_of(model: Model, kind: str) -> Iterator[tuple[Pair, Parameter, Parameter]]:
    """Yield the pairs of a layer type of an adapted model, each with its A and B."""
    experts, parameters = expert_keys(model), {p.name: p for p in model.types[kind].parameters}
    for name, first in parameters.items():
        module = name.removesuffix(FIRST)
        if module == name:
            continue
        second = parameters[f"{module}{SECOND}"]
        if first.ep_dim is not UNSET:
            last = len(second.shape) == len(first.shape)
            yield Pair(module, f"{_EXPERTS}.{DOWN if last else GATE_UP}", True, first.shape[1]), first, second
        else:
            is_router = experts is not None and module == experts.router
            yield Pair(module, f"{module}.weight", is_router, first.shape[0]), first, second


def adapter_config(model: Model) -> dict[str, Any]:
    """Return the adapter_config.json with which peft opens an adapter of an adapted model, listing full names."""
    low_rank, paths = model.low_rank, paths_of(model)
    assert low_rank is not UNSET
    pairs = {
        f"{paths[place]}{pair.target}": pair for place, kind in layers_of(model) for pair, _, _ in pairs_of(model, kind)
    }
    return {
        "peft_type": "LORA",
        "r": low_rank.rank,
        "lora_alpha": _whole(low_rank.alpha),
        "target_modules": [name for name, pair in pairs.items() if not pair.is_parameter],
        "target_parameters": sorted({pair.target for pair in pairs.values() if pair.is_parameter}) or None,
        "rank_pattern": {name: pair.rank for name, pair in pairs.items() if pair.rank != low_rank.rank},
        "alpha_pattern": {} if low_rank.alphas is UNSET else {n: _whole(x) for n, x in low_rank.alphas.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _outputs_last(model),
        "use_rslora": low_rank.rank_stabilized,
        "init_lora_weights": low_rank.starts_at_zero,
        "inference_mode": True,
    }


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number
