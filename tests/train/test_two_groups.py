"""A layer whose parameters two groups of ranks share trains as one process does, auxiliary losses included."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import run_parity
from forked_ranks import run_worker
from random_plans import random_plan
from rest_long import rest_long
from run_parity import TOLERANCE
from run_resumes import TOLERANCE as RESUMED
from run_resumes import resumed, saved
from tiny_models import tiny
from two_groups import CONFIG, DENSE, NAME, SPARSE, TwofoldForCausalLM, registered

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types import (
    DataParallel,
    GradientReduction,
    LayerStrategy,
    Plan,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_train.models.base import family_named

Errors = dict[str, dict[str, float]]
MUTATIONS = ("auxiliary_losses_without_gradient", "units_not_reduced")
SPLIT, ULYSSES = SequenceParallel.MEGATRON, SequenceParallel.ULYSSES
ZERO2, ZERO3 = DataParallel.ZERO2, DataParallel.ZERO3


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


def start(worker: str, arguments: Sequence[str], world_size: int) -> None:
    run_worker("units_worker", [worker, *arguments], world_size)


def plan_of(
    name: str,
    world_size: int,
    tp_size: int = 1,
    stages: int = 1,
    recompute: Recompute = Recompute.NONE,
    microbatches: int = 2,
    **sharding: object,
) -> Plan:
    """One strategy for all layers."""
    model = tiny(NAME)
    plan = random_plan(model, 0, world_size, widths=(world_size // stages,) * stages)
    strategy = {"tp_size": tp_size, "dp_size": world_size // stages // tp_size, **sharding}
    layers = (LayerStrategy(type=kind, recompute=recompute, **strategy) for kind in model.layers)  # type: ignore[arg-type]
    outer = Strategy(**strategy)  # type: ignore[arg-type]
    reduction = GradientReduction.EVERY_MICROBATCH if recompute is Recompute.FULL else GradientReduction.DEFERRED
    return msgspec.structs.replace(
        plan,
        name=f"{name} on {world_size}",
        embedding=outer,
        head=outer,
        layers=tuple(layers),
        num_microbatches=microbatches,
        gradient_reduction=reduction,
    )


def plans_on(world_size: int) -> list[Plan]:
    """Plans whose units are sharded otherwise than their layers: by ZeRO-3 under DDP, by DDP under ZeRO-2."""
    chosen = [
        plan_of("ddp", world_size),
        plan_of("zero2", world_size, recompute=Recompute.SELECTIVE, data_parallel=ZERO2),
        plan_of("zero3", world_size, recompute=Recompute.MLP, data_parallel=ZERO3),
        plan_of("replicas of positions", world_size, 2, data_parallel=ZERO3),
        plan_of("megatron", world_size, 2, recompute=Recompute.SELECTIVE, sequence_parallel=SPLIT),
        plan_of("all of zero3", world_size, 2, recompute=Recompute.FULL, sequence_parallel=SPLIT, data_parallel=ZERO3),
        plan_of("ulysses", world_size, 2, recompute=Recompute.ATTENTION, sequence_parallel=ULYSSES),
        plan_of("ulysses zero2", world_size, 2, sequence_parallel=ULYSSES, data_parallel=ZERO2),
        plan_of("ddp full", world_size, recompute=Recompute.FULL),
        plan_of("stages", world_size, stages=2, microbatches=4, recompute=Recompute.FULL),
        plan_of("stages zero3", world_size, stages=2, microbatches=4, data_parallel=ZERO3),
    ]
    # Its units are replicated on all ranks: their gradients are reduced in place.
    last = plan_of("mutated", world_size, 2, sequence_parallel=SPLIT, data_parallel=ZERO2)
    return [*chosen, *(random_plan(tiny(NAME), number, world_size) for number in range(6)), last]


@pytest.fixture(scope="module", params=rest_long(1, [2, 4]))
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return run_parity.compare(plans_on(request.param), tmp_path_factory.mktemp("units"), start, MUTATIONS)


def test_two_groups_of_parameters_train_as_one_process(errors: Errors) -> None:
    exact = {name: each for name, each in errors.items() if name not in MUTATIONS}
    assert len(exact) == len(plans_on(2))
    assert {name: each for name, each in exact.items() if max(each.values()) > TOLERANCE} == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_about_groups_or_auxiliary_losses_is_seen(errors: Errors, mutation: str) -> None:
    assert errors[mutation]["gradient"] > 1e4 * TOLERANCE


@pytest.mark.parametrize("ranks", rest_long(1, [2, 4]))
def test_what_is_saved_under_two_groups_goes_on_under_other_plans(tmp_path: Path, ranks: int) -> None:
    plans = [plan_of("ddp", ranks), plan_of("zero3", ranks, data_parallel=ZERO3)]
    stages = plan_of("stages", ranks, stages=2, data_parallel=ZERO2)
    others = [plan_of("all", ranks, 2, sequence_parallel=ULYSSES), stages]
    told = saved(tmp_path, start, plans)
    assert max(one.error for one in resumed(tmp_path, start, [*plans, *others], told)) < RESUMED


def test_types_of_layers_are_read_by_index_alike_with_and_without_torch() -> None:
    config = CONFIG | {"mlp_layer_types": [SPARSE, DENSE, DENSE, SPARSE]}
    described = tiny(NAME, **config)
    assert described.layers == (SPARSE, DENSE, DENSE, SPARSE)
    assert model_of_config(config, described.name, described.sequence_length, "config.json") == described
    stock = family_named(NAME, "test").stock_model(described)
    assert isinstance(stock, TwofoldForCausalLM) and [hasattr(x, "extra") for x in stock.model.layers] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([DENSE] * 3, "mlp_layer_types is not a list of the types of 4 layers"),
        (DENSE, "mlp_layer_types is not a list of the types of 4 layers"),
        ([DENSE, DENSE, "odd", DENSE], "mlp_layer_types 'odd' is not one of dense, sparse"),
    ],
)
def test_a_list_of_types_that_does_not_fit_is_one_line(listed: object, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        model_of_config(CONFIG | {"mlp_layer_types": listed}, "m", 16, "config.json")
