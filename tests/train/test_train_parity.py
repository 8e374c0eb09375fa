"""Whatever a plan says, training it gives what one process gives: loss, every gradient, and three AdamW steps."""

from collections.abc import Callable

import msgspec
import pytest

from shardwright_formats.placement import layout_of
from shardwright_formats.plan import Plan
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

Errors = dict[str, dict[str, float]]
PlanMaker = Callable[..., Plan]

TOLERANCE = 1e-10
ON_TWO_RANKS = 12
ON_FOUR_RANKS = 6
MUTATIONS = (
    "norm_gradients_not_summed",
    "bias_added_by_every_rank",
    "gradients_averaged_instead_of_summed",
    "pieces_swapped_in_redistribution",
    "sequence_gradient_scaled",
    "replicated_squares_counted_twice",
)


def _mixed_plan(plan: Plan) -> Plan:
    """A plan on two ranks of one stage that does everything at once, for the mutations to break."""
    split = {"tp_size": 2, "dp_size": 1}
    shared = {"tp_size": 1, "dp_size": 2}
    layers = (
        LayerStrategy(type="block", **split, sequence_parallel=SequenceParallel.MEGATRON),
        LayerStrategy(type="block", **shared, recompute=Recompute.FULL),
        LayerStrategy(type="block", **shared, data_parallel=DataParallel.ZERO3),
        LayerStrategy(type="block", **split, recompute=Recompute.FULL),
    )
    embedding = Strategy(**shared, data_parallel=DataParallel.ZERO2)
    head = Strategy(**split, sequence_parallel=SequenceParallel.MEGATRON)
    return msgspec.structs.replace(
        plan, name="mixed", layers=layers, embedding=embedding, head=head, num_microbatches=2, schedule="1f1b"
    )


@pytest.fixture(scope="module")
def two_ranks(random_plan: PlanMaker, compare: Callable[..., Errors]) -> Errors:
    plans = [random_plan(i, 2) for i in range(ON_TWO_RANKS)]
    low_precision = [random_plan(i, 2, dtype) for i in (1, 3) for dtype in ("float32", "bfloat16")]
    mixed = _mixed_plan(random_plan(1, 2, stages=1))
    return compare([*low_precision, *plans, mixed], MUTATIONS)


@pytest.fixture(scope="module")
def four_ranks(random_plan: PlanMaker, compare: Callable[..., Errors]) -> Errors:
    return compare([random_plan(i, 4) for i in range(ON_FOUR_RANKS)])


def test_plans_on_two_ranks_train_exactly_as_one_process(two_ranks: Errors) -> None:
    exact = {name: errors for name, errors in two_ranks.items() if "float64" in name or name == "mixed"}
    assert len(exact) == ON_TWO_RANKS + 1
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


def test_plans_on_four_ranks_train_exactly_as_one_process(four_ranks: Errors) -> None:
    assert len(four_ranks) == ON_FOUR_RANKS
    assert {name: errors for name, errors in four_ranks.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_lower_precision_stays_near_one_process(two_ranks: Errors, dtype: str, tolerance: float) -> None:
    near = {name: errors["loss"] for name, errors in two_ranks.items() if name.endswith(dtype)}
    assert len(near) == 2
    assert {name: error for name, error in near.items() if error > tolerance} == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_runtime_is_seen(two_ranks: Errors, mutation: str) -> None:
    assert max(two_ranks[mutation].values()) > 1e-6


def test_the_compared_plans_cover_every_value_of_every_field(random_plan: PlanMaker) -> None:
    plans = [random_plan(i, 2) for i in range(ON_TWO_RANKS)] + [random_plan(i, 4) for i in range(ON_FOUR_RANKS)]
    layers = [layer for plan in plans for layer in plan.layers]
    assert {layer.tp_size for layer in layers} == {1, 2, 4}
    assert {layer.data_parallel for layer in layers if layer.dp_size > 1} == set(DataParallel)
    assert {layer.recompute for layer in layers} == {Recompute.NONE, Recompute.FULL}
    assert {layout_of(layer).consecutive for layer in layers} == {True, False}
    assert {layout_of(layer).sequence_split for layer in layers} == {True, False}
    assert {len(plan.stages) for plan in plans} == {1, 2}
    assert {plan.num_microbatches for plan in plans} == {1, 2, 4}
    assert len({plan.schedule for plan in plans}) == len({plan.gradient_reduction for plan in plans}) == 2
