"""ZeRO-3's gathers as the runtime starts them, a layer ahead: numbers worked out by hand."""

import msgspec
import pytest

from shardwright.types import DataParallel, Schedule
from shardwright_search.cost_model.collectives import Slowdowns
from shardwright_search.cost_model.layer import Gather, LayerCost
from shardwright_search.cost_model.parameters import ParameterMemory
from shardwright_search.cost_model.plan import cost_model_of
from shardwright_search.cost_model.stage_costs import RangeCosts, range_costs
from shardwright_search.options import UniformRequest
from shardwright_search.uniform_plan import uniform_plan

GATHER = Gather(100, Slowdowns(1.25, 2.0))
NO_MEMORY = ParameterMemory(**dict.fromkeys(ParameterMemory.__struct_fields__, 0))


def layer(forward: int, backward: int, gather: Gather = GATHER) -> LayerCost:
    numbers = {name: 0 for name in LayerCost.__struct_fields__ if name.endswith(("_ps", "_bytes"))}
    passes = {"forward_ps": forward, "backward_ps": backward}
    return LayerCost(**(numbers | passes), gather=gather, slowdowns=None, memory=NO_MEMORY, warnings=())


def passes(*layers: LayerCost, first: tuple[float, float]) -> tuple[int, int]:
    numbers = {name: 0 for name in RangeCosts.__struct_fields__ if name.endswith(("_ps", "_bytes"))}
    times = RangeCosts(**numbers, layers=layers, gathered_first=first, overlap=None, warnings=()).times
    return times.forward_ps, times.backward_ps


def test_a_gather_goes_on_beside_the_layer_before_and_not_its_own() -> None:
    """A gather of 100 takes 200 beside a computation, which a fifth of it is lost to.

    Beside 10 it goes on alone after 12.5, in which 6.25 of it are done: 96.25 more. Beside 20 likewise 92.5 more.
    """
    small, large = layer(10, 20), layer(400, 800)
    assert passes(small, large, first=(0.0, 0.0)) == (10 + 96 + 400, 800 + 40 + 20)
    # The pass before ends with the other layer: forward beside the large one, backward beside the small one.
    assert passes(small, large, first=(1.0, 1.0)) == (10 + 96 + 400 + 40, 800 + 40 + 20 + 92)
    assert passes(small, large, first=(0.25, 0.25)) == (10 + 96 + 400 + 10, 800 + 40 + 20 + 23)


def test_after_a_layer_of_another_kind_a_pass_waits_for_its_first_gather() -> None:
    sharded, replicated = layer(400, 800), layer(400, 800, Gather())
    assert passes(sharded, replicated, first=(1.0, 1.0)) == (400 + 100 + 400, 800 + 40 + 800)
    assert passes(sharded, sharded, first=(0.0, 0.0)) == (400 + 40 + 400, 800 + 40 + 800)


@pytest.mark.parametrize(
    ("schedule", "pp", "shares"),
    [
        # One forward, one backward: all but the first forward pass begin with the layer that was last worked on.
        (Schedule.ONE_F_ONE_B, 1, [(1 / 4, 0.0)]),
        # All forward, then all backward: the first backward pass begins where the last forward pass ended.
        (Schedule.GPIPE, 1, [(1.0, 3 / 4)]),
        # F0 F1 B0 F2 B1 F3 B2 B3, and F0 B0 F1 B1 F2 B2 F3 B3.
        (Schedule.ONE_F_ONE_B, 2, [(2 / 4, 1 / 4), (1 / 4, 0.0)]),
    ],
)
def test_gathers_that_the_schedule_spares_are_not_counted(make, schedule, pp, shares) -> None:
    model, cluster = make.model(), make.cluster(4)
    request = UniformRequest(
        global_batch_size=16, num_microbatches=4, pp_size=pp, data_parallel=DataParallel.ZERO3, schedule=schedule
    )
    plan = uniform_plan("plan", request, model, cluster)
    costs = cost_model_of(plan, make.profiles(model, cluster))
    assert [own.gathered_first for own in range_costs(plan, costs)] == shares
    replicated = uniform_plan("plan", msgspec.structs.replace(request, data_parallel=DataParallel.DDP), model, cluster)
    assert {own.gathered_first for own in range_costs(replicated, costs)} == {(1.0, 1.0)}
