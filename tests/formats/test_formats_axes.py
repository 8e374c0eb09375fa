"""Which axis a strategy cuts what along; a kind of parallelism that has no axis fails and shards nothing."""

from collections import Counter
from enum import StrEnum
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
from msgspec import UNSET, structs

from shardwright.models.description import model_of_config
from shardwright.plan.axes import Axis, axes_of, effective, layout_of, strategy_on
from shardwright.plan.communication import parameter_messages
from shardwright.plan.layout import parameter_box, parameter_groups, zigzag
from shardwright.types import (
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    LayerType,
    Parameter,
    SequenceParallel,
    Strategy,
)
from shardwright.types.plan import misfit

NONE, MEGATRON, ULYSSES = SequenceParallel
RING = ContextParallel.RING


def _made_up(kind: type[StrEnum], name: str) -> Any:
    """A value that an enum may have one day."""
    value = str.__new__(kind, name)
    value._name_, value._value_ = name.upper(), name
    return value


class SplitStrategy(Strategy, frozen=True, kw_only=True):
    """A strategy with a degree that no axis knows."""

    width_size: int = 1


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp_size=2, dp_size=2, sequence_parallel=_made_up(SequenceParallel, "ring")),
        Strategy(tp_size=2, dp_size=2, data_parallel=_made_up(DataParallel, "zero4")),
        SplitStrategy(tp_size=2, dp_size=2, width_size=2),
    ],
    ids=["sequence", "data", "degree"],
)
def test_parallelism_without_an_axis_fails_and_shards_nothing(strategy):
    parameter = Parameter(name="weight", shape=(8, 8), tp_dim=0)
    kind = LayerType(parameters=(parameter,), forward_flops_per_sample=1)
    for asks in (
        axes_of,
        layout_of,
        effective,
        lambda given: parameter_box(parameter, given, 0),
        lambda given: list(parameter_messages(kind, given, 4, 4, 1, False)),
    ):
        with pytest.raises((AssertionError, NotImplementedError), match=r"ring|zero4|width_size"):
            asks(strategy)


@pytest.mark.parametrize(
    ("kind", "consecutive", "samples", "sequence", "heads", "tensor", "states"),
    [
        (NONE, True, Axis(3, 2), Axis(1), Axis(1), Axis(2), Axis(3, 2)),
        (NONE, False, Axis(3), Axis(1), Axis(1), Axis(2, 3), Axis(3)),
        (MEGATRON, True, Axis(3, 2), Axis(2), Axis(1), Axis(2), Axis(3, 2)),
        (MEGATRON, False, Axis(3), Axis(2, 3), Axis(1), Axis(2, 3), Axis(3)),
        (ULYSSES, True, Axis(3, 2), Axis(2), Axis(2), Axis(1), Axis(6)),
        (ULYSSES, False, Axis(3), Axis(2, 3), Axis(2, 3), Axis(1), Axis(6)),
    ],
)
def test_each_kind_cuts_along_the_axes_of_the_table(kind, consecutive, samples, sequence, heads, tensor, states):
    axes = axes_of(Strategy(tp_size=2, dp_size=3, tp_consecutive=consecutive, sequence_parallel=kind))
    assert (axes.layout.samples, axes.layout.sequence) == (samples, sequence)
    assert (axes.heads, axes.dense.tensor, axes.dense.states) == (heads, tensor, states)
    assert axes.layout.replicas == (1 if kind is not NONE else 2)
    assert axes.gathers_sequence is (kind is MEGATRON) and axes.exchanges_heads is (kind is ULYSSES)
    assert axes.rank_samples(6) == 2


@pytest.mark.parametrize(
    ("kind", "tensor", "states", "heads", "sequence", "replicas"),
    [
        (NONE, Axis(3), Axis(4, 3), Axis(1), Axis(2, 3), 3),
        (MEGATRON, Axis(3), Axis(4, 3), Axis(1), Axis(6), 1),
        (ULYSSES, Axis(1), Axis(12), Axis(3), Axis(6), 1),
    ],
)
def test_context_parallelism_cuts_positions_between_samples_and_tensors(
    kind: SequenceParallel, tensor: Axis, states: Axis, heads: Axis, sequence: Axis, replicas: int
) -> None:
    """12 ranks as 2 x 2 x 3: samples, parts of their positions, tensor-parallel ranks."""
    axes = axes_of(Strategy(tp_size=3, cp_size=2, dp_size=2, sequence_parallel=kind))
    assert (axes.dense.tensor, axes.dense.states, axes.heads) == (tensor, states, heads)
    assert (axes.layout.samples, axes.context, axes.layout.sequence) == (Axis(2, 6), Axis(2, 3), sequence)
    assert (axes.layout.replicas, axes.gathers_sequence) == (replicas, kind is MEGATRON) and axes.shares_context
    shards = [axes.layout.activation_shard(rank, 2, 12)[1:] for rank in (0, 2, 3, 11)]
    length = 12 // sequence.size
    starts = (0, 2 * length * (kind is not NONE), 6)
    assert shards == [*((1, start, start + length) for start in starts), (2, 12 - length, 12)]


def test_positions_that_attend_across_ranks_lie_as_those_of_any_split_sequence():
    split = Strategy(tp_size=2, dp_size=2, sequence_parallel=MEGATRON)
    assert layout_of(Strategy(tp_size=1, cp_size=2, dp_size=2)) == layout_of(split)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_zigzag_shares_of_every_divisor_are_as_much_causal_work(parts: int) -> None:
    order = zigzag(24, parts)
    assert sorted(order) == list(range(24)) and (parts > 1 or order == tuple(range(24)))
    for ranks in (size for size in range(1, parts + 1) if parts % size == 0):
        share = 24 // ranks
        assert len({sum(order[first : first + share]) for first in range(0, 24, share)}) == 1


def _strategies(ranks: int) -> list[Strategy]:
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    plain = (
        Strategy(tp_size=size, dp_size=ranks // size, tp_consecutive=near, data_parallel=kind, sequence_parallel=split)
        for size, near, kind, split in product(divisors, (True, False), DataParallel, SequenceParallel)
    )
    found = []
    for strategy in plain:
        found.append(strategy)
        for shard_size in range(1, ranks + 1):
            try:
                found.append(structs.replace(strategy, shard_size=shard_size))
            except ValueError:
                continue
    return found


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_the_axes_of_a_group_of_parameters_reach_every_rank_once(ranks):
    """The type refuses exactly those shard sizes that cut no axis into equal groups."""
    sharded = Counter[bool]()
    for strategy in _strategies(ranks):
        dense = axes_of(strategy).dense
        assert dense.tensor.size * dense.states.size == ranks
        assert dense.shards * dense.replicas == dense.states.size
        places = {(dense.tensor.part_of(rank), dense.states.part_of(rank)) for rank in range(ranks)}
        assert len(places) == ranks
        for axis in (dense.tensor, dense.states, axes_of(strategy).layout.samples, axes_of(strategy).layout.sharers):
            groups = axis.groups(range(ranks))
            assert sorted(rank for group in groups for rank in group) == list(range(ranks))
            assert all([axis.part_of(rank) for rank in group] == list(range(axis.size)) for group in groups)
        sharded[dense.replicates_shards] += 1
        assert dense.replicates_shards is (strategy.shard_size > 0)
    assert sharded[True] > 0 or ranks < 4


def test_ranks_that_hold_one_shard_sum_its_gradients_and_neighbours_hold_all_shards():
    dense = axes_of(Strategy(tp_size=2, dp_size=4, data_parallel=DataParallel.ZERO2, shard_size=2)).dense
    assert list(dense.state_groups(range(8))) == [
        *((0, 2), (4, 6), (0, 4), (2, 6)),
        *((1, 3), (5, 7), (1, 5), (3, 7)),
    ]
    parameter = Parameter(name="weight", shape=(8, 4), tp_dim=0)
    strategy = Strategy(tp_size=2, dp_size=4, data_parallel=DataParallel.ZERO2, shard_size=2)
    rows = [parameter_box(parameter, strategy, rank)[0] for rank in range(8)]
    assert rows == 2 * [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_every_field_of_a_strategy_changes_what_is_cut():
    given = Strategy(tp_size=2, dp_size=4, data_parallel=DataParallel.ZERO2, shard_size=2)
    changes: dict[str, Any] = {
        "tp_size": 4,
        "tp_consecutive": False,
        "dp_size": 8,
        "cp_size": 2,
        "shard_size": 0,
        "sequence_parallel": MEGATRON,
    }
    for name, value in changes.items():
        assert axes_of(structs.replace(given, **{name: value})) != axes_of(given), name
    plain = structs.replace(given, shard_size=0)
    assert axes_of(plain) != axes_of(structs.replace(plain, data_parallel=DataParallel.DDP))
    assert {*changes, "data_parallel"} == set(Strategy.__struct_fields__)


def test_a_strategy_on_a_stage_takes_all_of_its_ranks():
    assert strategy_on(6, 2) == Strategy(tp_size=2, dp_size=3)
    assert strategy_on(6, 4) is None


@pytest.mark.parametrize(("shards", "dim"), [(2, 0), (4, 0), (8, 3), (16, 3), (5, 0), (1, 0)])
def test_zero_cuts_experts_that_the_ranks_do_not_divide_along_what_nothing_else_cuts(shards: int, dim: int) -> None:
    """4 experts of features that 2 tensor-parallel ranks share, and 16 hidden ones, which 5 ranks do not divide."""
    parameter = Parameter(name="gate_up", shape=(4, 2, 6, 16), tp_dim=2, ep_dim=0)
    strategy = Strategy(tp_size=2, dp_size=shards, data_parallel=DataParallel.ZERO3)
    boxes = [parameter_box(parameter, strategy, rank) for rank in range(2 * shards)]
    assert parameter.states_dim(2, shards) == dim
    assert {box[other] for box in boxes for other in (0, 1, 3) if other != dim} <= {(0, 4), (0, 2), (0, 16)}
    sizes = [prod(high - low for low, high in box) for box in boxes]
    assert sum(sizes) == 4 * 2 * 6 * 16 and max(sizes) == parameter.shard_numel(2, shards)
    held = [set(product(*(range(low, high) for low, high in box))) for box in boxes]
    assert len(set[tuple[int, ...]]().union(*held)) == sum(sizes)
    assert shards == 5 or len(set(sizes)) == 1


@pytest.mark.parametrize(
    ("ep_size", "etp_size", "shard_size"),
    [(1, 1, 0), (2, 1, 0), (4, 1, 0), (8, 1, 0), (2, 1, 2), (1, 2, 0), (2, 2, 0), (4, 2, 0), (1, 2, 2)],
)
def test_ranks_that_share_experts_out_hold_each_expert_once_and_the_rest_as_the_layer_says(
    ep_size: int, etp_size: int, shard_size: int
) -> None:
    shared = {"ep_size": ep_size, "etp_size": etp_size, "shard_size": shard_size}
    experts = ExpertStrategy(**shared, data_parallel=DataParallel.ZERO3)  # type: ignore[arg-type]
    split = {"tp_size": 2, "dp_size": 4, "sequence_parallel": SequenceParallel.MEGATRON}
    layer = LayerStrategy(type="sparse", **split, experts=experts)
    gate_up, router = Parameter(name="up", shape=(8, 2, 6, 16), tp_dim=2, ep_dim=0), Parameter(name="g", shape=(8, 16))
    held = Counter[tuple[int, ...]]()
    for rank in range(8):
        box = parameter_box(gate_up, layer, rank)
        assert box[2] == _share_of(rank % etp_size, etp_size, 6)
        assert set(range(*box[0])) <= set(range(*_share_of(rank // etp_size % ep_size, ep_size, 8)))
        held.update(product(*(range(low, high) for low, high in box)))
        assert parameter_box(router, layer, rank) == ((0, 8), (0, 16))
    replicas = 8 // (ep_size * etp_size)
    assert set(held.values()) == {replicas // (shard_size or replicas)} and len(held) == 8 * 2 * 6 * 16
    kind = LayerType(parameters=(gate_up, router), forward_flops_per_sample=0)
    (rest, dense), (own, grid) = parameter_groups(kind, layer)
    assert (rest.parameters, own.parameters) == ((router,), (gate_up.of_experts(ep_size),))
    assert own.parameters[0].numel(etp_size) * ep_size * etp_size == 8 * 2 * 6 * 16
    axes = axes_of(grid).dense
    assert (dense.experts, axes.tensor, axes.experts) == (UNSET, Axis(etp_size), Axis(ep_size, etp_size))  # type: ignore[attr-defined]


def _share_of(part: int, parts: int, length: int) -> tuple[int, int]:
    return part * length // parts, (part + 1) * length // parts


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": ExpertStrategy(ep_size=3)}, "ep_size 3 does not divide the 4 ranks of the stage"),
        ({"experts": ExpertStrategy(ep_size=2, etp_size=4)}, "ep_size 2 x etp_size 4 does not divide the 4 ranks of"),
        ({"tp_size": 2, "dp_size": 2, "experts": ExpertStrategy(ep_size=2)}, "different positions"),
        ({"experts": ExpertStrategy(ep_size=2, shard_size=2)}, "ddp does not shard states"),
        (
            {"experts": ExpertStrategy(ep_size=2, data_parallel=DataParallel.ZERO2, shard_size=2)},
            "not a proper divisor",
        ),
    ],
)
def test_what_cannot_share_experts_out_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LayerStrategy(**{"type": "sparse", "tp_size": 1, "dp_size": 4} | changes)


def test_only_what_has_experts_shares_them_out() -> None:
    config = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 6}
    model = model_of_config(config, "m", 16, "config.json")
    asked = partial(LayerStrategy, type="sparse", tp_size=1, dp_size=4)
    assert misfit(model, "sparse", asked(experts=ExpertStrategy(ep_size=2))) is None
    assert (
        misfit(model, "sparse", asked(experts=ExpertStrategy(ep_size=4))) == "ep_size 4 does not divide its 6 experts"
    )
    odd = misfit(model, "sparse", asked(tp_size=1, dp_size=5, experts=ExpertStrategy(ep_size=1, etp_size=5)))
    assert odd == "etp_size 5 does not divide the 24 features of its experts"
    assert misfit(model, "head", asked(experts=ExpertStrategy(ep_size=2))) == "it has no experts to shard"


@pytest.mark.parametrize(
    ("length", "changes", "problem"),
    [
        (16, {"cp_size": 4, "dp_size": 1}, None),
        (16, {"cp_size": 2, "tp_size": 4, "sequence_parallel": MEGATRON}, None),
        (20, {"cp_size": 4, "dp_size": 1}, "2 x cp_size 4 does not divide the sequence length 20"),
        (12, {"cp_size": 2, "tp_size": 4, "sequence_parallel": ULYSSES}, "cp_size 2 x tp_size 4 does not divide"),
        (16, {"cp_size": 2, "context": RING}, "context ring does not support windows: use gather"),
    ],
)
def test_positions_are_shared_out_in_two_chunks_a_rank(length: int, changes: dict[str, Any], problem: str) -> None:
    config = {"model_type": "mistral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 6}
    model = model_of_config(config, "m", length, "config.json")
    (kind,) = model.layers
    wrong = misfit(model, kind, LayerStrategy(**{"type": kind, "tp_size": 1, "dp_size": 2} | changes))
    assert wrong is None if problem is None else wrong is not None and wrong.startswith(problem)


def test_a_ring_leaves_out_attention_with_sinks() -> None:
    config = {"model_type": "gpt_oss", "hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = model_of_config(config, "m", 16, "config.json")
    strategy = LayerStrategy(type="block", tp_size=1, dp_size=1, cp_size=2)
    assert misfit(model, "block", strategy) is None
    ring = structs.replace(strategy, context=RING)
    assert misfit(model, "block", ring) == "context ring does not support sinks: use gather"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cp_size": 2, "tp_consecutive": False}, "tp_consecutive false is not supported with cp_size 2"),
        ({"context": RING}, "context ring needs cp_size above 1"),
        ({"cp_size": 3, "dp_size": 2, "data_parallel": DataParallel.ZERO3, "shard_size": 4}, "of the 6 ranks"),
    ],
)
def test_what_cannot_share_positions_out_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LayerStrategy(**{"type": "block", "tp_size": 1, "dp_size": 4} | changes)
