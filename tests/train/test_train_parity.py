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
from special_plans import chunked_plan, hollow_plan, in_groups, mixed_plan, replicas_behind_a_cut
from tiny_models import CONFIGS, tiny
from tiny_multi_modal import SEVERAL

from shardwright.plan.axes import layout_of
from shardwright.types.plan import GradientReduction, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, Recompute, SequenceParallel

Errors = dict[str, dict[str, float]]
Compare = Callable[..., Errors]

COMPILED = ("llama", "t5")
"""`make compiled` has all of them."""
# Several launches of many processes on two cores.
pytestmark = pytest.mark.timeout(900)

JOINT = {schedule for schedule in Schedule if not schedule.splits}
"""tests/train/test_split_backward.py compares the others with these."""
NUMBERS = {2: range(2), 4: range(3)}
ON_TWO = "two_ranks", "two_ranks_again"
"""The plans in two parts: `make test` has every family once, exactly, and `make test-long` the rest."""
ON_EIGHT = ("llama", "t5", "vit")
"""`make parity` has 45 plans of each family, 5 of them on 8 ranks."""
CONTEXT_FIRST = ("context 0:", "context 4:", "context 17:", "context 22:")
"""Plans with context parallelism in the first half."""
LOW_PRECISION = (("float32", 1e-5), ("bfloat16", 0.1))
LOW_FIRST = {
    "float32": ("llama", "baichuan", "deepseek_v3"),
    "bfloat16": ("t5", "mixtral", "whisper"),
}
"""Families in lower precision in the first part: those of whose layers some compute in a wider format, among others."""
GROUPED_EVERY = 11
"""One family in so many has a plan with parameter groups in the first part."""
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


def _plans(world_size: int, every: int = 1) -> list[Plan]:
    if world_size == 8:
        return [random_plan(tiny(family), 0, 8) for family in ON_EIGHT]
    models = [tiny(family) for family in FAMILIES[::every]]
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


def _first_on_two() -> list[Plan]:
    """Every family exactly, and some plans of every other kind."""
    exact, families = _plans(2), len(FAMILIES)
    drawn = [exact[i % 2 * families + i] for i in range(families)]
    packed = [plan for i, plan in enumerate(_packed_plans(2)) if i % (len(PACKED) + 1) == 0]
    experts = [*shared_plans(2)[::2], *skewed_plans(2)[::2]]
    context = [plan for plan in context_plans(2) if plan.name.startswith(CONTEXT_FIRST)]
    compiled = _compiled(random_plan(tiny(COMPILED[0]), 0, 2))
    low_precision = [random_plan(tiny(family), 1, 2, dtype) for dtype in LOW_FIRST for family in LOW_FIRST[dtype]]
    grouped = _grouped_plans(2)
    grouped = [*grouped[:families:GROUPED_EVERY], *grouped[families:]]
    others = [*experts, *context, *_completions_plans(), chunked_plan(), hollow_plan()]
    return [*low_precision, *drawn, compiled, *grouped, *packed, *others]


def _rest_on_two() -> list[Plan]:
    """What the first part leaves out."""
    first = {plan.name for plan in _first_on_two()}
    compiled = _compiled(random_plan(tiny(COMPILED[1]), 0, 2))
    low_precision = [random_plan(tiny(family), 1, 2, dtype) for dtype in LOW_FIRST for family in FAMILIES]
    experts = [*shared_plans(2), *skewed_plans(2)]
    others = [*low_precision, *_plans(2), *_grouped_plans(2), *_packed_plans(2), *experts, *context_plans(2)]
    return [compiled, *(plan for plan in others if plan.name not in first)]


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


def _completions_plans() -> list[Plan]:
    """Plans whose ranks and micro-batches learn unequal numbers of tokens."""
    drawn = [random_plan(tiny("llama"), number, 2) for number in range(24)]
    several = [plan for plan in drawn if plan.num_microbatches > 1]
    split = next(plan for plan in several if plan.head.dp_size == 2)
    staged = next(plan for plan in several if len(plan.stages) == 2)
    apart = [plan for plan in context_plans(2) if plan.name.startswith(("context 21:", "context 22:"))]
    return [msgspec.structs.replace(plan, name=f"completions {plan.name}") for plan in (split, staged, *apart)]


def _reduced_in_float32() -> Plan:
    """The mixed plan, but replicated layers are not computed as they are stored and reduced: FSDP2 holds them."""
    precision = Precision(parameters="float64", compute="float64", reduce="float32")
    return msgspec.structs.replace(mixed_plan(), name="narrow sums", precision=precision)


@pytest.fixture(scope="module")
def two_ranks(compare: Compare) -> Errors:
    return compare([*_first_on_two(), _reduced_in_float32(), mixed_plan()], MUTATIONS)


@pytest.fixture(scope="module")
def two_ranks_again(compare: Compare) -> Errors:
    return compare(_rest_on_two())


@pytest.fixture(scope="module")
def more_ranks(compare: Compare, every: int) -> Errors:
    kinds = [_uneven_plans(), _bare_plans(), _grouped_plans(4), _packed_plans(4)]
    kinds += [[*shared_plans(4)], [*skewed_plans(4)], [*context_plans(4)]]
    several = [plan for kind in kinds for plan in kind[::every]]
    four = compare([*_plans(4, every), *several, replicas_behind_a_cut(), *in_groups(4)])
    return four | compare([*_plans(8), *in_groups(8)])


@pytest.fixture
def compared(request: pytest.FixtureRequest, ranks: str, every: int) -> Callable[[str, int], None]:
    """Return what raises AssertionError unless so many plans of a prefix were compared and none differs."""
    found: Errors = request.getfixturevalue(ranks)
    return lambda prefix, count: _all_exact(found, prefix, _thinned(count, every) if ranks == "more_ranks" else count)


def _thinned(count: int, every: int) -> int:
    return len(range(0, count, every))


def _all_exact(found: Errors, prefix: str, count: int) -> None:
    """Raise AssertionError unless so many plans of that prefix were compared and none differs."""
    _assert_exact({name: errors for name, errors in found.items() if name.startswith(prefix)}, count)


def _assert_exact(errors: Errors, count: int) -> None:
    assert len(errors) == count
    assert {name: found for name, found in errors.items() if max(found.values()) > TOLERANCE} == {}


@pytest.mark.parametrize("ranks", rest_long(1, ON_TWO))
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_on_two_ranks_train_exactly_as_one_process(
    request: pytest.FixtureRequest, ranks: str, family: str
) -> None:
    found: Errors = request.getfixturevalue(ranks)
    exact = {name: errors for name, errors in found.items() if name.startswith(f"{family} ") and "float64" in name}
    _assert_exact(exact, 1)


@pytest.mark.parametrize(("ranks", "family"), rest_long(1, zip(ON_TWO, COMPILED, strict=True)))
def test_compiled_plans_train_exactly_as_one_process(request: pytest.FixtureRequest, ranks: str, family: str) -> None:
    _all_exact(request.getfixturevalue(ranks), f"compiled {family} ", 1)


_MORE = ("two_ranks", "more_ranks", "two_ranks_again")
_GROUPED_REST = len(FAMILIES) - len(FAMILIES[::GROUPED_EVERY])
_GROUPED_ALL = len(FAMILIES) + 1 + len(SEVERAL)
_GROUPED = (_GROUPED_ALL - _GROUPED_REST, _GROUPED_ALL, _GROUPED_REST)
_PACKED = (3, 2 * len(PACKED), 3 * len(PACKED) - 3)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _GROUPED, strict=True)))
def test_parameters_that_decay_and_learn_otherwise_train_as_in_one_process(
    compared: Callable[[str, int], None], count: int
) -> None:
    compared("grouped", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _PACKED, strict=True)))
def test_documents_of_one_sample_train_as_if_each_were_alone(compared: Callable[[str, int], None], count: int) -> None:
    compared("packed", count)


def test_loss_on_completions_is_the_mean_over_all_of_the_global_batch(two_ranks: Errors) -> None:
    """Ranks and micro-batches without any target, packed samples, context parallelism, a pipeline."""
    assert any(layer.cp_size == 2 for plan in _completions_plans() for layer in plan.layers)
    _all_exact(two_ranks, "completions", 4)


_CONTEXT = (len(CONTEXT_FIRST), len(context_plans(4)), len(context_plans(2)) - len(CONTEXT_FIRST))


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, (3, 17, 2), strict=True)))
def test_experts_that_ranks_share_out_train_exactly_as_one_process(
    compared: Callable[[str, int], None], count: int
) -> None:
    compared("shared", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, (3, 18, 3), strict=True)))
def test_crowded_experts_and_ranks_without_rows_train_exactly_as_one_process(
    compared: Callable[[str, int], None], count: int
) -> None:
    """Whole models, of which the stock one was seen to route by each skew."""
    assert {skew_of(plan) for plan in skewed_plans(2)} == set(SKEWS)
    compared("skewed", count)


@pytest.mark.parametrize(("ranks", "count"), rest_long(1, zip(_MORE, _CONTEXT, strict=True)))
def test_positions_that_attend_across_ranks_train_exactly_as_one_process(
    compared: Callable[[str, int], None], count: int
) -> None:
    """Unlike cp sizes in one plan, with every kind of mask, documents, long positions, GQA, unequal widths."""
    compared("context", count)


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
    _assert_exact(exact, len(NUMBERS[4]) + (family in ON_EIGHT))


@pytest.mark.long
def test_pipeline_stages_of_unequal_width_train_exactly_as_one_process(more_ranks: Errors, every: int) -> None:
    uneven = {name: errors for name, errors in more_ranks.items() if "+" in name}
    assert {plan.schedule for plan in _uneven_plans()} == JOINT
    assert any(plan.model.tied for plan in _uneven_plans())
    _assert_exact(uneven, _thinned(len(_uneven_plans()), every))


def test_chunks_inside_without_blocks_train_exactly_as_one_process(two_ranks: Errors) -> None:
    _all_exact(two_ranks, "hollow chunks", 1)


@pytest.mark.long
def test_stages_and_chunks_without_blocks_train_exactly_as_one_process(more_ranks: Errors, every: int) -> None:
    bare = {name: errors for name, errors in more_ranks.items() if name.startswith("bare")}
    assert {len(plan.stages) for plan in _bare_plans()} == {2, 4}
    assert any(plan.model.tied for plan in _bare_plans())
    _assert_exact(bare, _thinned(len(_bare_plans()), every))


@pytest.mark.long
def test_replicated_layers_behind_a_pipeline_cut_train_exactly_as_one_process(more_ranks: Errors) -> None:
    assert max(more_ranks["replicas behind a cut"].values()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("world_size", [4, 8])
def test_replicas_of_shards_train_exactly_as_one_process(more_ranks: Errors, world_size: int) -> None:
    _assert_exact({name: more_ranks[name] for name in (plan.name for plan in in_groups(world_size))}, 2)


@pytest.mark.parametrize("ranks", rest_long(1, ON_TWO))
@pytest.mark.parametrize(("dtype", "tolerance"), LOW_PRECISION)
def test_lower_precision_stays_near_one_process(
    request: pytest.FixtureRequest, ranks: str, dtype: str, tolerance: float
) -> None:
    found: Errors = request.getfixturevalue(ranks)
    # In bfloat16 a token near the border between two experts may go to the other one: its gradients do not compare.
    kinds = ("loss", "gradient") if dtype == "float32" else ("loss",)
    near = {name: max(errors[kind] for kind in kinds) for name, errors in found.items() if name.endswith(dtype)}
    first = len(LOW_FIRST[dtype])
    assert len(near) == (first if ranks == "two_ranks" else len(FAMILIES) - first)
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
    assert {plan.schedule for plan in plans} == JOINT
    assert {plan.gradient_reduction for plan in plans} == set(GradientReduction)
    assert any(plan.num_microbatches < len(plan.stages) for plan in plans)
