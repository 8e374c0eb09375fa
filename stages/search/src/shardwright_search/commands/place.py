"""`shardwright place`: the experts of a plan on its ranks, by the load that a run logged."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.command import show
from shardwright.display.columns import line_width, wrapped
from shardwright.io import BadInput, read_document, write_document
from shardwright.plan.axes import neighbouring_experts
from shardwright.plan.expert_placement import load_misfit
from shardwright.types import ExpertLoad, Plan
from shardwright_search.commands.prediction import prediction_of_evaluated, read_inputs, written
from shardwright_search.cost_model.expert_load import Groups, LoadFile, assign, fullest_load
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import PlaceOptions, ProfileOptions

_UNIT = 10**12
"""Parts of a layer's load, so that shares are whole numbers."""


class _Placed(NamedTuple):
    """A layer's experts as they are placed, with ratios of the fullest group's load to the mean group's."""

    layer: int
    groups: Groups
    before: float
    after: float
    bound: float


def place(options: PlaceOptions) -> None:
    """Write the plan with its experts placed, and its prediction if there are profiles: both or neither."""
    if bool(options.hardware) != bool(options.profile):
        raise BadInput("--hardware and --profile", "one is given without the other", "give both or neither")
    plan, load = read_document(options.plan, Plan), read_document(options.load, ExpertLoad)
    if (problem := load_misfit(load, plan.model)) is not None:
        raise BadInput(options.load, f"does not fit: {problem}", "give the load of a run of this model")
    found = list(placed_layers(plan, load))
    if not found:
        problem = "has no layer of this load with ep_size above 1"
        raise BadInput(options.plan, problem, "experts can only be placed where ranks shard them")
    after = with_placement(plan, {one.layer: one.groups for one in found})
    lines = [*_table(found), *_left_out(plan, {one.layer for one in found})]
    if not options.hardware:
        write_document(options.out, after)
        show(wrapped(lines, line_width()))
        return
    inputs = read_inputs(ProfileOptions(hardware=options.hardware, profile=options.profile))
    # Both predictions are by mean shares: for placed experts the load has no peaks of single steps.
    shares = replace(load, layers=tuple(replace(one, groups=()) for one in load.layers))
    profiles = inputs.profiles.each(lambda one: one._replace(load=LoadFile(options.load, shares)))
    then, now = evaluate(plan, profiles, timeline=False), evaluate(after, profiles)
    files = {"plan": options.plan, "imbalance": options.load} | inputs.files
    then_s, now_s = (each.estimate.simulated_step_time_s for each in (then, now))
    lines.append(f"predicted {then_s * 1e3:.3f} ms a step, placed {now_s * 1e3:.3f} ms ({now_s / then_s - 1:+.1%})")
    with written(options.out, after, prediction_of_evaluated(after, now, files)):
        show(wrapped(lines, line_width()))


def placed_layers(plan: Plan, load: ExpertLoad) -> Iterator[_Placed]:
    """Yield the layers of a load whose experts ranks shard, with the best groups that were found.

    A layer that would gain nothing keeps its groups.
    """
    for one in load.layers:
        now = _groups_of(plan, one.layer, len(one.shares))
        if len(now) < 2:
            continue
        loads = [round(share * _UNIT) for share in one.shares]
        best, before = assign(loads, len(now)), fullest_load(loads, now)
        groups, after = (best.groups, best.fullest) if best.fullest < before else (now, before)
        mean = sum(loads) / len(now)
        yield _Placed(one.layer, groups, before / mean, after / mean, best.bound / mean)


def with_placement(plan: Plan, groups: dict[int, Groups]) -> Plan:
    """Return a plan with the experts of these layers in groups; neighbours are left out."""
    here = plan.expert_placement or ((),) * len(plan.layers)
    new = (groups.get(number, entry) for number, entry in enumerate(here))
    entries = tuple(() if sorted(order := sum(entry, ())) == list(order) else entry for entry in new)
    return replace(plan, expert_placement=entries if any(entries) else UNSET)


def _groups_of(plan: Plan, layer: int, number: int) -> Groups:
    """Return the groups of a layer's experts under a plan; there are none unless ranks shard them."""
    experts = plan.layers[layer].experts
    if experts is UNSET:
        return ()
    placed = plan.expert_placement[layer] if plan.expert_placement else ()
    return placed or neighbouring_experts(number, experts)


def _table(found: Sequence[_Placed]) -> Iterator[str]:
    """Yield a line for each layer, and one for all."""
    yield "the fullest rank's positions over the mean rank's:"
    for one in found:
        gap = one.after / one.bound - 1
        proof = "the least there is" if gap == 0 else f"none is below {one.bound:.4f} (gap {gap:.3%})"
        yield f"layer {one.layer}: {one.before:.4f}, placed {one.after:.4f}; {proof}"
    before, after = (
        sum(values) / len(found) for values in zip(*((one.before, one.after) for one in found), strict=True)
    )
    yield f"mean of {len(found)} layer(s): {before:.4f}, placed {after:.4f}"


def _left_out(plan: Plan, placed: set[int]) -> Iterator[str]:
    """Yield a line on layers whose experts ranks shard and that the load does not have."""
    numbers = ((i, plan.model.types[layer.type].experts) for i, layer in enumerate(plan.layers))
    shared = (i for i, experts in numbers if experts and len(_groups_of(plan, i, experts.number)) > 1)
    if lacking := [str(i) for i in shared if i not in placed]:
        yield f"not in the load, and as before: layers {', '.join(lacking)}"
