"""Whatever a plan says, training it gives what one process gives: loss, every gradient, and three AdamW steps."""

from collections.abc import Callable

import msgspec
import pytest
from compared_families import FAMILIES, PACKED
from context_plans import context_plans
from random_plans import bare_plan, random_plan, uneven_plan
from rest_long import rest_long
from run_parity import TOLERANCE
from shared_experts import shared_plans
from skewed_routing import SKEWS, skew_of, skewed_plans
from tiny_models import CONFIGS, tiny
from tiny_multi_modal import SEVERAL

from shardwright_formats.semantics.axes import layout_of
from shardwright_formats.types.plan import GradientReduction, Plan, Precision, Schedule
from shardwright_formats.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

Errors = dict[str, dict[str, float]]
Compare = Callable[..., Errors]

COMPILED = ("llama", "t5")
"""`make compiled` has all of them."""
# Several launches of many processes on two cores.
pytestmark = pytest.mark.timeout(900)

NUMBERS = {2: range(2), 4: range(3)}
ON_TWO = "two_ranks", "two_ranks_again"
"""Two halves of the plans: `make test` has every family in one number and one lower precision, `make test-long` all."""
ON_EIGHT = ("llama", "t5", "vit")
"""`make parity` has 45 plans of each family, 5 of them on 8 ranks."""
CONTEXT_FIRST = ("context 0:", "context 4:", "context 17:", "context 22:")
"""Plans with context parallelism in the first half."""
LOW_PRECISION = (("float32", 1e-5), ("bfloat16", 0.1))
MUTATIONS = (
    "norm_gradients_not_summed",
    "bias_added_by_every_rank",
    "gradients_averaged_instead_of_summed",
    "pieces_swapped_in_redistribution",
    "sequence_gradient_scaled",
    "replicated_squares_counted_twice",
    "a_transfer_skipped",
    "partial_gradients_reduced_twice",
    "copies_of_tied_parameters_not_summed",
    "copies_counted_twice_in_the_norm",
)


def _plans(world_size: int) -> list[Plan]:
    if world_size == 8:
        return [random_plan(tiny(family), 0, 8) for family in ON_EIGHT]
    models = [tiny(family) for family in FAMILIES]
    return [random_plan(model, number, world_size) for number in NUMBERS[world_size] for model in models]


def _uneven_plans() -> list[Plan]:
    """Every family, and every kind of unequal widths."""
    interleaved = uneven_plan(tiny("llama"), 101, 4)
    return [*(uneven_plan(tiny(family), number, 4) for number, family in enumerate(FAMILIES)), interleaved]


def _bare_plans() -> list[Plan]:
    """Embedding and head alone, in stages and in model chunks."""
    return [bare_plan(tiny(family), 7 + i, 4) for i, family in enumerate(FAMILIES)]


def _compiled(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, name=f"compiled {plan.name}", compile=True)


def _half_on_two(half: int) -> list[Plan]:
    """Half of the plans on two ranks; of packed ones the first half has three."""
    exact, grouped, packed = _plans(2), _grouped_plans(2), _packed_plans(2)
    families = len(FAMILIES)
    drawn = [exact[(i + half) % 2 * families + i] for i in range(families)]
    low_precision = [
        random_plan(tiny(family), 1, 2, LOW_PRECISION[(i + half) % 2][0]) for i, family in enumerate(FAMILIES)
    ]
    compiled = _compiled(random_plan(tiny(COMPILED[half]), 0, 2))
    packed = [plan for i, plan in enumerate(packed) if (i % (len(PACKED) + 1) == 0) == (half == 0)]
    chunked = [_chunked_plan()] if half == 0 else []
    packed += [*shared_plans(2)[half::2], *skewed_plans(2)[half::2]]
    packed += [plan for plan in context_plans(2) if plan.name.startswith(CONTEXT_FIRST) == (half == 0)]
    return [*low_precision, *drawn, compiled, *grouped[half::2], *packed, *chunked]


def _chunked_plan() -> Plan:
    """A plan as a search makes it of 4 layers in chunks of 2, of which the first and the last one lack all."""
    plan = bare_plan(tiny("llama"), 1, 2)
    ranges = (((0, 0), (2, 4)), ((0, 2), (4, 4)))
    stages = tuple(
        msgspec.structs.replace(stage, layers=layers) for stage, layers in zip(plan.stages, ranges, strict=True)
    )
    assert len(plan.layers) == 4 and plan.schedule is Schedule.INTERLEAVED_1F1B
    return msgspec.structs.replace(plan, name="chunks that lack layers", stages=stages)


def _grouped_plans(world_size: int) -> list[Plan]:
    """Every family, its embedding tied where it can be, with parameters that decay and learn otherwise."""
    models = [tiny(family) for family in FAMILIES] + [tiny("llama", tie_word_embeddings=True)]
    models += [tiny(family, **changes) for family, changes in SEVERAL.items()]
    drawn = [random_plan(model, number, world_size) for number, model in enumerate(models)]
    return [msgspec.structs.replace(plan, name=f"grouped {plan.name} {plan.model.tied}") for plan in drawn]


def _packed_plans(world_size: int) -> list[Plan]:
    """Families whose samples may be of several documents, which are told nothing of one another."""
    numbers = range(3) if world_size == 2 else range(3, 5)
    drawn = [random_plan(tiny(family), number, world_size) for number in numbers for family in PACKED]
    return [msgspec.structs.replace(plan, name=f"packed {plan.name}") for plan in drawn]


def _mixed_plan() -> Plan:
    """A plan on two ranks of one stage that does everything at once, for the mutations to break."""
    plan = random_plan(tiny("llama", tie_word_embeddings=True), 1, 2, stages=1)
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


def _reduced_in_float32() -> Plan:
    """The same, where replicated layers are not computed as they are stored and reduced, so that FSDP2 holds them."""
    precision = Precision(parameters="float64", compute="float64", reduce="float32")
    return msgspec.structs.replace(_mixed_plan(), name="narrow sums", precision=precision)


def _sharded_in_groups(world_size: int, tied: bool) -> Plan:
    """Every kind of layer whose states groups of ranks share out, beside such as all share out, or none."""
    plan = random_plan(tiny("llama", tie_word_embeddings=tied), 3, world_size, stages=1)
    half = {"data_parallel": DataParallel.ZERO3, "shard_size": world_size // 2}
    whole = {"tp_size": 1, "dp_size": world_size}
    grid = {"tp_size": 2, "dp_size": world_size // 2}
    if world_size > 4:
        inner = {"data_parallel": DataParallel.ZERO2, "shard_size": 2}
        layers = [{**grid, **inner}, {**grid, **inner, "tp_consecutive": False}]
    else:
        layers = [{**whole, "data_parallel": DataParallel.ZERO2, "shard_size": 2}, {**grid, "data_parallel": "zero3"}]
    layers += [{**whole, **half}, {**grid, **half, "sequence_parallel": SequenceParallel.ULYSSES, "recompute": "full"}]
    return msgspec.structs.replace(
        plan,
        name=f"shard groups on {world_size}, tied {tied}",
        layers=tuple(LayerStrategy(type="block", **layer) for layer in layers),  # type: ignore[arg-type]
        embedding=Strategy(**whole, **half),  # type: ignore[arg-type]
        head=Strategy(**whole, data_parallel=DataParallel.ZERO2, shard_size=2),
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if tied else GradientReduction.DEFERRED,
    )


def _in_groups(world_size: int) -> list[Plan]:
    return [_sharded_in_groups(world_size, tied) for tied in (False, True)]


def _replicas_behind_a_cut() -> Plan:
    """Replicated layers whose inputs come from another stage: gradients must be there before they are reduced."""
    plan = random_plan(tiny("vit"), 4, 4, stages=2)
    sharding = {"tp_size": 1, "dp_size": 2}
    layers = tuple(LayerStrategy(type=kind, **sharding, recompute=Recompute.FULL) for kind in plan.model.layers)
    return msgspec.structs.replace(
        plan,
        name="replicas behind a cut",
        embedding=Strategy(**sharding),
        head=Strategy(**sharding),
        layers=layers,
        gradient_reduction=GradientReduction.DEFERRED,
        num_microbatches=1,
    )


@pytest.fixture(scope="module")
def two_ranks(compare: Compare) -> Errors:
    return compare([*_half_on_two(0), _reduced_in_float32(), _mixed_plan()], MUTATIONS)


@pytest.fixture(scope="module")
def two_ranks_again(compare: Compare) -> Errors:
    return compare(_half_on_two(1))


@pytest.fixture(scope="module")
def more_ranks(compare: Compare) -> Errors:
    drawn = [*_plans(4), *_uneven_plans(), *_bare_plans(), *_grouped_plans(4), *_packed_plans(4)]
    four = compare(
        [*drawn, *shared_plans(4), *skewed_plans(4), *context_plans(4), _replicas_behind_a_cut(), *_in_groups(4)]
    )
    return four | compare([*_plans(8), *_in_groups(8)])


@pytest.mark.parametrize("ranks", rest_long(1, ON_TWO))
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_on_two_ranks_train_exactly_as_one_process(
    request: pytest.FixtureRequest, ranks: str, family: str
) -> None:
    found: Errors = request.getfixturevalue(ranks)
    exact = {name: errors for name, errors in found.items() if name.startswith(f"{family} ") and "float64" in name}
    assert len(exact) == 1
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.parametrize(("ranks", "family"), rest_long(1, zip(ON_TWO, COMPILED, strict=True)))
def test_compiled_plans_train_exactly_as_one_process(request: pytest.FixtureRequest, ranks: str, family: str) -> None:
    found: Errors = request.getfixturevalue(ranks)
    exact = {name: errors for name, errors in found.items() if name.startswith(f"compiled {family} ")}
    assert len(exact) == 1
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


def _all_exact(found: Errors, prefix: str, count: int) -> None:
    """Raise AssertionError unless so many plans of that prefix were compared and none differs."""
    exact = {name: errors for name, errors in found.items() if name.startswith(prefix)}
    assert len(exact) == count
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


_MORE = (*ON_TWO, "more_ranks")
_GROUPED = (-(-(len(FAMILIES) + 1) // 2), (len(FAMILIES) + 1) // 2, len(FAMILIES) + 1)
_PACKED = (3, 3 * len(PACKED) - 3, 2 * len(PACKED))


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _GROUPED, strict=True)))
def test_parameters_that_decay_and_learn_otherwise_train_as_in_one_process(
    request: pytest.FixtureRequest, ranks: str, count: int
) -> None:
    _all_exact(request.getfixturevalue(ranks), "grouped", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _PACKED, strict=True)))
def test_documents_of_one_sample_train_as_if_each_were_alone(
    request: pytest.FixtureRequest, ranks: str, count: int
) -> None:
    _all_exact(request.getfixturevalue(ranks), "packed", count)


_CONTEXT = (len(CONTEXT_FIRST), len(context_plans(2)) - len(CONTEXT_FIRST), len(context_plans(4)))


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, (3, 2, 17), strict=True)))
def test_experts_that_ranks_share_out_train_exactly_as_one_process(
    request: pytest.FixtureRequest, ranks: str, count: int
) -> None:
    _all_exact(request.getfixturevalue(ranks), "shared", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, (3, 3, 18), strict=True)))
def test_crowded_experts_and_ranks_without_rows_train_exactly_as_one_process(
    request: pytest.FixtureRequest, ranks: str, count: int
) -> None:
    """Whole models, of which the stock one was seen to route by each skew."""
    assert {skew_of(plan) for plan in skewed_plans(2)} == set(SKEWS)
    _all_exact(request.getfixturevalue(ranks), "skewed", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _CONTEXT, strict=True)))
def test_positions_that_attend_across_ranks_train_exactly_as_one_process(
    request: pytest.FixtureRequest, ranks: str, count: int
) -> None:
    """Unlike cp sizes in one plan, with every kind of mask, documents, long positions, GQA, unequal widths."""
    _all_exact(request.getfixturevalue(ranks), "context", count)


def test_tied_parameters_in_different_layouts_train_as_one(two_ranks: Errors) -> None:
    assert max(two_ranks["mixed"].values()) < TOLERANCE


def test_replicated_layers_that_fsdp_holds_train_as_one_process(two_ranks: Errors) -> None:
    errors = two_ranks["narrow sums"]
    # Adam divides by gradients however small they are: parameters say little of float32's rounding.
    assert max(errors["loss"], errors["gradient"], errors["norm"]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_on_more_ranks_train_exactly_as_one_process(more_ranks: Errors, family: str) -> None:
    exact = {name: errors for name, errors in more_ranks.items() if name.startswith(f"{family} ") and "+" not in name}
    assert len(exact) == len(NUMBERS[4]) + (family in ON_EIGHT)
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.long
def test_pipeline_stages_of_unequal_width_train_exactly_as_one_process(more_ranks: Errors) -> None:
    uneven = {name: errors for name, errors in more_ranks.items() if "+" in name}
    assert len(uneven) == len(_uneven_plans())
    assert {plan.schedule for plan in _uneven_plans()} == set(Schedule)
    assert any(plan.model.tied for plan in _uneven_plans())
    assert {name: errors for name, errors in uneven.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.long
def test_stages_and_chunks_without_blocks_train_exactly_as_one_process(more_ranks: Errors) -> None:
    bare = {name: errors for name, errors in more_ranks.items() if name.startswith("bare")}
    assert {len(plan.stages) for plan in _bare_plans()} == {2, 4} and len(bare) == len(_bare_plans())
    assert any(plan.model.tied for plan in _bare_plans())
    assert {name: errors for name, errors in bare.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.long
def test_replicated_layers_behind_a_pipeline_cut_train_exactly_as_one_process(more_ranks: Errors) -> None:
    assert max(more_ranks["replicas behind a cut"].values()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("world_size", [4, 8])
def test_replicas_of_shards_train_exactly_as_one_process(more_ranks: Errors, world_size: int) -> None:
    exact = {name: more_ranks[name] for name in (plan.name for plan in _in_groups(world_size))}
    assert {name: errors for name, errors in exact.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.parametrize("ranks", rest_long(1, ON_TWO))
@pytest.mark.parametrize(("dtype", "tolerance"), LOW_PRECISION)
def test_lower_precision_stays_near_one_process(
    request: pytest.FixtureRequest, ranks: str, dtype: str, tolerance: float
) -> None:
    found: Errors = request.getfixturevalue(ranks)
    near = {name: errors["loss"] for name, errors in found.items() if name.endswith(dtype)}
    assert len(near) in (len(FAMILIES) // 2, -(-len(FAMILIES) // 2))
    assert {name: error for name, error in near.items() if error > tolerance} == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_runtime_is_seen(two_ranks: Errors, mutation: str) -> None:
    assert max(two_ranks[mutation].values()) > 1e-6


def test_the_compared_plans_cover_every_value_of_every_field() -> None:
    assert set(FAMILIES) <= set(CONFIGS)
    plans = [plan for world_size in (2, 4, 8) for plan in _plans(world_size)]
    layers = [layer for plan in plans for layer in plan.layers]
    assert {layer.tp_size for layer in layers} == {1, 2, 4, 8}
    assert {layer.data_parallel for layer in layers if layer.dp_size > 1} == set(DataParallel)
    assert {layer.data_parallel for layer in layers if layer.shard_size} == {DataParallel.ZERO2, DataParallel.ZERO3}
    assert {layer.sequence_parallel for layer in layers if layer.tp_size > 1} == set(SequenceParallel)
    assert {layer.recompute for layer in layers} == set(Recompute)
    assert {layout_of(layer).consecutive for layer in layers} == {True, False}
    assert {len(plan.stages) for plan in plans} == {1, 2, 4}
    assert {plan.num_microbatches for plan in plans} == {1, 2, 4}
    assert {plan.schedule for plan in plans} == set(Schedule)
    assert {plan.gradient_reduction for plan in plans} == set(GradientReduction)
    assert any(plan.num_microbatches < len(plan.stages) for plan in plans)
