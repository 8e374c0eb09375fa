"""The assignment of experts to groups of ranks, the command that writes it into a plan, and its price."""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command_calls import call
from msgspec import UNSET
from msgspec.structs import replace
from test_search_shared_experts import CLUSTER, CONFIG, MODEL, SETTINGS, loaded, plan_of, profiles, without_host

from shardwright.devices.table import read_devices
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.io import BadInput, read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.plan.expert_placement import experts_by_place, neighbours
from shardwright.types import ExpertLoad, ExpertStrategy, GroupLoad, LayerLoad, Plan, Prediction
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright.types.model_profile import write_model_profile
from shardwright_search.cli import APP
from shardwright_search.commands.place import placed_layers, with_placement
from shardwright_search.cost_model.expert_load import LoadFile, StatedLoad, assign, fullest_load, lower_bound
from shardwright_search.cost_model.experts import placed_imbalance
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.tables import plan_differences
from shardwright_search.options import UniformRequest
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

__all__ = ["profiles", "without_host"]

SHARES = (0.4, 0.3, 0.2, 0.1)
EP2 = ExpertStrategy(ep_size=2)
PLACED = ((0, 3), (1, 2))


def partitions(experts: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put experts into groups of a size, whose order does not matter."""
    if not experts:
        yield []
        return
    first, *others = experts
    for more in combinations(others, size - 1):
        rest = [expert for expert in others if expert not in more]
        yield from ([(first, *more), *groups] for groups in partitions(rest, size))


def random_loads(draw: random.Random, experts: int) -> list[int]:
    kinds = draw.choice([lambda: draw.randrange(4), lambda: draw.randrange(1000), lambda: int(draw.paretovariate(1))])
    return [kinds() for _ in range(experts)]


def test_the_assignment_of_few_experts_is_the_best_of_all_partitions() -> None:
    draw = random.Random(5)
    shapes = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (2, 5), (5, 2), (1, 4), (4, 1), (1, 1))
    for number in range(400):
        groups, size = shapes[number % len(shapes)]
        loads = random_loads(draw, groups * size)
        best = min(fullest_load(loads, each) for each in partitions(range(len(loads)), size))
        found = assign(loads, groups)
        assert found.fullest == found.bound == best == fullest_load(loads, found.groups), loads
        assert lower_bound(loads, groups) <= best, loads
        assert sorted(sum(found.groups, ())) == list(range(len(loads)))
        assert {len(group) for group in found.groups} == {size} and assign(loads, groups) == found


@pytest.mark.parametrize(("experts", "groups"), [(16, 4), (64, 8), (128, 16), (128, 64), (256, 8), (256, 32)])
def test_the_assignment_of_many_experts_is_near_a_bound(experts: int, groups: int) -> None:
    draw = random.Random(experts + groups)
    for power in (0.5, 1.0, 2.0):
        loads = [round(1e9 * draw.expovariate(1.0) ** power) for _ in range(experts)]
        found, size = assign(loads, groups), experts // groups
        neighbours = [range(first, first + size) for first in range(0, experts, size)]
        assert found.bound <= found.fullest == fullest_load(loads, found.groups) < fullest_load(loads, neighbours)
        assert found.fullest <= 1.003 * found.bound, (power, found.fullest / found.bound)


def test_runs_of_neighbours_cover_a_ranks_places() -> None:
    assert list(neighbours((5, 0, 1, 2, 4, 3), 1, 6)) == [
        (slice(0, 3), (0, 3)), (slice(3, 4), (4, 5)), (slice(4, 5), (3, 4)),
    ]  # fmt: skip
    placed = replace(plan_of(EP2), expert_placement=((), PLACED))
    names = ("embedding", "layers[0]", "layers[1]", "head")
    assert [experts_by_place(placed, name) for name in names] == [None, None, (0, 3, 1, 2), None]


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ((PLACED,), "1 entries of expert_placement for a model of 2 layers"),
        (((), ()), "expert_placement places no experts: leave it out"),
        (((), ((0, 1), (2, 3))), r"expert_placement\[1\]: it is the order without it: leave it empty"),
        (((), ((0, 3), (1, 1))), r"expert_placement\[1\]: it is not each of the 4 experts once, in 2 groups of equal"),
        ((((0, 3, 1), (2,)), ()), r"expert_placement\[0\]: it is not each of the 4 experts once"),
        ((((1,), (0,), (2,), (3,)), ()), r"expert_placement\[0\]: it is not each of the 4 experts once, in 2 groups"),
    ],
)
def test_a_placement_that_is_none_is_refused(placement: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(plan_of(EP2), expert_placement=placement)


@pytest.mark.parametrize("experts", [UNSET, ExpertStrategy(ep_size=1)])
def test_only_experts_that_ranks_shard_are_placed(experts: Any) -> None:
    with pytest.raises(ValueError, match=r"expert_placement\[0\]: its layer has no ep_size above 1: leave it empty"):
        replace(plan_of(experts), expert_placement=(PLACED, ()))


def test_a_placement_is_executed_and_shown_and_none_leaves_a_plan_as_it_was() -> None:
    plain, placed = plan_of(EP2), replace(plan_of(EP2), expert_placement=(PLACED, ()))
    assert placed.executed_sha256 != plain.executed_sha256
    assert list(plan_differences(plain, placed)) == ["expert_placement: 0 layers → 1 layers"]
    assert with_placement(placed, {0: ((0, 1), (2, 3))}) == plain


def test_a_placed_layer_is_priced_by_its_own_shares(without_host: Profiles) -> None:
    """Consecutive experts have 1.4 times the mean; placed ones 1, whose price is that of an even load."""
    given, even = loaded(without_host, *SHARES), loaded(without_host, 0.25, 0.25, 0.25, 0.25)
    plain = plan_of(EP2)
    placed = replace(plain, expert_placement=(PLACED, PLACED))
    half = replace(plain, expert_placement=((), PLACED))
    times = [evaluate(each, given).objective_ps for each in (plain, half, placed)]
    assert times[2] == evaluate(plain, even).objective_ps < times[1] < times[0] == evaluate(plain, given).objective_ps
    assert times[0] - times[1] == pytest.approx(times[1] - times[2], abs=20)
    assert [placed_imbalance(given, half, number) for number in range(2)] == [None, pytest.approx(1.0)]
    assert evaluate(placed, without_host).objective_ps == evaluate(plain, without_host).objective_ps
    stated = without_host._replace(load=StatedLoad(1.5))
    assert evaluate(placed, stated).objective_ps == evaluate(plain, stated).objective_ps
    assert any("placed experts get their mean shares" in line for line in evaluate(placed, given).warnings)


def test_a_load_without_a_placed_layer_does_not_price_it(without_host: Profiles) -> None:
    only = ExpertLoad(model="m", first_step=1, last_step=2, layers=(LayerLoad(layer=0, shares=SHARES),))
    placed = replace(plan_of(EP2), expert_placement=((), PLACED))
    with pytest.raises(BadInput, match=r"load.json: has no load of layer 1, whose experts the plan places: give the"):
        evaluate(placed, without_host._replace(load=LoadFile(Path("load.json"), only)))


def test_layers_that_gain_nothing_keep_their_groups() -> None:
    rows = (LayerLoad(layer=0, shares=(0.25,) * 4), LayerLoad(layer=1, shares=SHARES))
    load = ExpertLoad(model="m", first_step=1, last_step=2, layers=rows)
    even, skewed = placed_layers(plan_of(EP2), load)
    assert even.groups == ((0, 1), (2, 3)) and even.before == even.after == even.bound == 1.0
    assert (skewed.groups, skewed.before, skewed.after) == (PLACED, pytest.approx(1.4), pytest.approx(1.0))
    placed = with_placement(plan_of(EP2), {one.layer: one.groups for one in (even, skewed)})
    assert placed.expert_placement == ((), PLACED)
    # Of a plan that places already, what it has is what a better placement is compared with.
    (_, again) = placed_layers(placed, load)
    assert again.before == again.after and again.groups == PLACED


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a plan whose layers' experts are sharded by twos, and the load of a run."""
    layers = tuple(LayerLoad(layer=number, shares=SHARES) for number in range(2))
    write_document(tmp_path / "plan.json", plan_of(EP2))
    write_document(tmp_path / "load.json", ExpertLoad(model="m", first_step=1, last_step=9, layers=layers))
    return tmp_path


def place(folder: Path, *more: object, plan: str = "plan.json") -> Any:
    return call(APP, "place", folder / plan, "--load", folder / "load.json", "--out", folder / "placed.json", *more)


def test_the_command_writes_the_plan_and_says_what_each_layer_gains(files: Path) -> None:
    ended = place(files)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "the fullest rank's positions over the mean rank's:",
        "layer 0: 1.4000, placed 1.0000; the least there is",
        "layer 1: 1.4000, placed 1.0000; the least there is",
        "mean of 2 layer(s): 1.4000, placed 1.0000",
    ]
    placed = read_document(files / "placed.json", Plan)
    assert placed == replace(plan_of(EP2), expert_placement=(PLACED, PLACED))


def test_with_profiles_it_says_what_a_step_gains_and_writes_the_prediction(files: Path) -> None:
    rates = rates_of(read_devices(), CLUSTER.node_types["n"].device)
    made = model_profile([(Path("m"), MODEL)], SETTINGS, rates, Efficiencies(), "today").profile
    write_model_profile(files / "m.h5", made)
    write_hardware_profile(files / "h.h5", hardware_profile(CLUSTER, [rates], Efficiencies(), None, "today"))
    given = "--hardware", files / "h.h5", "--profile", files / "m.h5"
    ended = place(files, *given)
    assert ended.exit_code == 0, ended.stderr
    said = re.fullmatch(r"predicted ([\d.]+) ms a step, placed ([\d.]+) ms \((.*)%\)", ended.stdout.splitlines()[-1])
    assert said and float(said[2]) <= float(said[1]) and float(said[3]) <= 0
    prediction = read_document(files / "placed.prediction.json", Prediction)
    assert prediction.estimate.simulated_step_time_s * 1e3 == pytest.approx(float(said[2]), abs=1e-3)
    out, load = files / "evaluated.json", ("--imbalance", files / "load.json")
    assert call(APP, "evaluate", files / "placed.json", *given, *load, "--out", out).exit_code == 0
    assert read_document(out, Prediction).estimate == prediction.estimate
    # Of peaks that the load has of groups of neighbours, both times are without.
    peaks = [{"groups": (GroupLoad(ep_size=2, imbalance=1.9),)} for _ in range(2)]
    read = read_document(files / "load.json", ExpertLoad)
    layers = tuple(replace(layer, **each) for layer, each in zip(read.layers, peaks, strict=True))
    write_document(files / "load.json", replace(read, layers=layers))
    assert place(files, *given).stdout == ended.stdout


def test_one_profile_without_the_other_is_refused(files: Path) -> None:
    ended = place(files, "--hardware", files / "h.h5")
    assert (ended.exit_code, ended.stderr) == (
        2, "error: --hardware and --profile: one is given without the other: give both or neither\n",
    )  # fmt: skip
    assert not (files / "placed.json").exists()


def test_what_cannot_be_placed_is_refused_in_one_line(files: Path) -> None:
    write_document(files / "whole.json", plan_of(UNSET))
    ended = place(files, plan="whole.json")
    assert ended.stderr == (
        f"error: {files / 'whole.json'}: has no layer of this load with ep_size above 1: "
        "experts can only be placed where ranks shard them\n"
    )
    other = model_of_config(CONFIG | {"num_local_experts": 8}, "other", 16, "config.json")
    write_document(files / "other.json", replace(plan_of(EP2), model=other))
    ended = place(files, plan="other.json")
    assert ended.exit_code == 2 and "does not fit: layer 0 of other has 8 experts, not 4" in ended.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_export_drops_a_placement(tmp_path: Path, system: str) -> None:
    """Of a model and a plan that each system has without it."""
    config = CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": 32, "max_position_embeddings": 64, "head_dim": 16}
    model = model_of_config({name: x for name, x in config.items() if name != "num_local_experts"}, "m", 64, "c.json")
    request = UniformRequest(global_batch_size=8, ep_size=2, precision_compute="bfloat16")
    plan = uniform_plan("p", request, model, CLUSTER)
    write_document(tmp_path / "placed.json", replace(plan, expert_placement=(PLACED, ())))
    ended = call(APP, "export", tmp_path / "placed.json", "--to", system, "--out", tmp_path / "out")
    assert ended.exit_code == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"error: {tmp_path / 'placed.json'}: expert_placement: ")
    assert ended.stderr.endswith(" does not support it: remove it from the plan\n")
