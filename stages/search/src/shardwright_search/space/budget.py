"""The memory that a rank may use, whether a plan fits it, and how much is missing if none does."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.notes import SPARE_SHARE
from shardwright.io import BadInput
from shardwright.io.table import Source
from shardwright.types import BASE_BITS, GIB, ITEMSIZE, Cluster, Estimate, Plan
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.solver.stopping import latest
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest

_LARGEST_BYTES = 2**52
"""More than any device has."""


class Infeasible(NamedTuple):
    """No plan fits: why, how much is missing on a rank, and the least budget with which one fits.

    Only a bound is known of the communicators' memory if stages have several chunks or different layers. Both numbers
    are then not `exact`: they may be too small.
    """

    reason: str
    missing_bytes: int
    min_bytes: int
    exact: bool
    stopped: bool = False
    """Whether time or Ctrl-C ended the search for what is missing; that no plan fits is known."""


class Shortfall(NamedTuple):
    """The configuration with the smallest memory excess, and the stage where it occurs."""

    configuration: Configuration
    stage: int
    node_type: str
    """Node type of that stage."""
    missing_bytes: int
    """Bytes that the stage needs beyond its budget; 0 or less if it fits."""


def budgets_of(request: SearchRequest, cluster: Cluster, file: Path) -> dict[str, int]:
    """Return the bytes that a rank may use, by node type: `memory_gib`, or all memory of the device, less the reserve.

    Raises BadInput if the request allows more than a device has, or names a node type that the cluster does not have.
    """
    used = dict.fromkeys(group.node_type for group in cluster.nodes)
    asked = request.memory_gib
    gib_of = asked if isinstance(asked, Mapping) else dict.fromkeys(used, asked)
    if unknown := [name for name in gib_of if name not in used]:
        problem = f"memory_gib names node type {unknown[0]!r}, cluster {cluster.name} has {', '.join(used)}"
        raise BadInput(file, problem, "name its node types")
    budgets = {}
    for name in used:
        device_bytes, gib = cluster.node_types[name].memory_bytes, gib_of.get(name)
        budget = device_bytes if gib is None else int(gib * GIB)
        if budget > device_bytes:
            problem = f"memory_gib {gib:g} is more than a device has, {device_bytes / GIB:.6g}"
            raise BadInput(file, problem, "lower memory_gib or leave it null")
        budgets[name] = budget - int(request.reserve_gib * GIB)
        if budgets[name] <= 0:
            raise BadInput(file, f"reserve_gib {request.reserve_gib:g} leaves nothing", "lower reserve_gib")
    return budgets


def with_spare(request: SearchRequest, cluster: Cluster, profiles: Profiles) -> SearchRequest:
    """Return the request with budgets for devices whose profile is estimated: their memory less `SPARE_SHARE` of it.

    A request that has a budget or a reserve is returned as it is.
    """
    if request.memory_gib is not None or request.reserve_gib:
        return request
    estimated = {each.origin.device for each in profiles.per_device if _is_estimated(each)}
    types = {group.node_type: cluster.node_types[group.node_type] for group in cluster.nodes}
    budgets = {
        name: _default_gib(node_type.memory_bytes) for name, node_type in types.items() if node_type.device in estimated
    }
    return replace(request, memory_gib=budgets) if budgets else request


def _is_estimated(profiles: Profiles) -> bool:
    estimated = ("forward_s", str(Source.ANALYTIC))
    return any(estimated in points.sources for points in profiles.layers.values())


def allowed_bytes(plan: Plan, estimate: Estimate, budgets: Mapping[str, int]) -> tuple[int, ...]:
    """Return the bytes that a rank of each pipeline stage may use: the least budget of the stage's node types.

    The default budget leaves a part of a device free for memory that is not known beforehand, such as communicators:
    the communicators of the stage may use it.
    """
    names, allowed = plan.cluster.node_type_of_rank, list[int]()
    for stage, place, device_bytes in zip(estimate.stages, plan.stages, device_bytes_of(plan), strict=True):
        budget = min(budgets[names[rank]] for rank in place.ranks)
        most = min(budget + stage.memory_terms_bytes.get("communicators", 0), device_bytes)
        is_default = budget == int(_default_gib(device_bytes) * GIB)
        allowed.append(most if is_default and budget < stage.memory_bytes <= most else budget)
    return tuple(allowed)


def over_bytes(plan: Plan, estimate: Estimate, budgets: Mapping[str, int]) -> tuple[int, ...]:
    """Return by how many bytes a rank of each stage exceeds its budget, or its host's budget; 0 or less: it fits."""
    allowed = allowed_bytes(plan, estimate, budgets)
    over = [stage.memory_bytes - most for stage, most in zip(estimate.stages, allowed, strict=True)]
    for number, (stage, place) in enumerate(zip(estimate.stages, plan.stages, strict=True)):
        if stage.host_bytes is not UNSET:
            host_bytes = min(plan.cluster.of_rank(rank).host_bytes for rank in place.ranks)
            over[number] = max(over[number], stage.host_bytes - host_bytes)
    return tuple(over)


def _default_gib(device_bytes: int) -> float:
    return device_bytes / GIB * (1 - SPARE_SHARE)


def headroom(plan: Plan, estimate: Estimate) -> tuple[int, float]:
    """Return the least that a plan leaves of a rank's device: its bytes, and their share of the device's memory."""
    left = [
        (device_bytes - stage.memory_bytes, device_bytes)
        for stage, device_bytes in zip(estimate.stages, device_bytes_of(plan), strict=True)
    ]
    free_bytes, device_bytes = min(left, key=lambda each: each[0] / each[1])
    return free_bytes, free_bytes / device_bytes


def device_bytes_of(plan: Plan) -> tuple[int, ...]:
    """Return the memory of the smallest device of each pipeline stage."""
    names, types = plan.cluster.node_type_of_rank, plan.cluster.node_types
    return tuple(min(types[names[rank]].memory_bytes for rank in stage.ranks) for stage in plan.stages)


def min_shortfall(instance: Instance, configurations: Sequence[Configuration]) -> Shortfall:
    """Return the least excess over the budget, over configurations with one chunk."""
    from shardwright_search.solver.min_memory import least_missing_bytes, min_memory

    least: Shortfall | None = None
    bounds = (least_missing_bytes(instance.problem(configuration)) for configuration in configurations)
    for bound, number in sorted((bound, number) for number, bound in enumerate(bounds)):
        if least is not None and bound >= least.missing_bytes:
            break
        most = inf if least is None else least.missing_bytes - 1
        if (plan := min_memory(instance.problem(configurations[number]), most)) is not None:
            node_type = instance.node_type(configurations[number], plan.group)
            least = Shortfall(configurations[number], plan.stage, node_type, plan.missing_bytes)
    if least is None:
        raise ValueError("no configuration")
    return least


def any_fits(instance: Instance, configurations: Sequence[Configuration]) -> bool:
    """Return whether a plan of some configuration fits; each has one chunk."""
    from shardwright_search.solver.min_memory import least_missing_bytes, min_memory

    problems = (instance.problem(configuration) for configuration in configurations)
    return any(least_missing_bytes(problem) <= 0 and min_memory(problem, 0) is not None for problem in problems)


def infeasible(
    instance: Instance,
    configurations: Sequence[Configuration],
    file: Path,
    subject: str = "even the leanest",
    deadline: float = inf,
) -> Infeasible:
    """Return by how much the configuration with the smallest need exceeds the budget; `subject` names it in the reason.

    If that is not known by the deadline, the excess of fully sharded states is returned.
    """
    shortfall, whole = latest(_shortfalls(instance, configurations), deadline)
    if shortfall is None:
        return _by_division(instance, file)._replace(stopped=True)
    # Measured memory may exceed the tables' by a factor.
    missing_bytes = ceil(shortfall.missing_bytes * instance.costs.profiles_on(shortfall.node_type).memory_factor)
    exact = whole and not instance.counts_communicators
    more = f"{'' if exact else 'more than '}{missing_bytes} bytes a rank in pipeline stage {shortfall.stage}"
    reason = f"{subject} ({shortfall.configuration}) exceeds the budget by {more}"
    return _lacking(instance, reason, shortfall.node_type, missing_bytes, exact, file)._replace(stopped=not whole)


def _shortfalls(instance: Instance, configurations: Sequence[Configuration]) -> Iterator[Shortfall]:
    """Yield a lower bound of plans' excess over the budget, if one is known early, and then the least excess.

    Plans with several chunks may need less than all plans with one. A plan that fits except for communicators that are
    not counted exceeds the budget by at least a byte.
    """
    single = [each for each in configurations if each.num_chunks == 1]
    least = min_shortfall(instance, single) if single else None
    if least is not None:
        least = least._replace(missing_bytes=max(1, least.missing_bytes))
    several = (_of_chunks(instance, each) for each in configurations if each.num_chunks > 1)
    bounds = sorted(several, key=lambda each: each.missing_bytes)
    for number, bound in enumerate(bounds):
        if least is not None and bound.missing_bytes >= least.missing_bytes:
            break
        if number == 0:
            yield bound
        least = _least_of_chunks(instance, bound, None if least is None else least.missing_bytes) or least
    if least is not None:
        yield least


def _least_of_chunks(instance: Instance, bound: Shortfall, below: int | None) -> Shortfall | None:
    """Return the excess of a configuration of several chunks, by bisection; None if it is not below `below`.

    `bound`: a lower bound of this excess.
    """
    from shardwright_search.solver.interleaved import Interleaved

    problem = instance.interleaved_problem(bound.configuration)

    def fits_with(more: int) -> bool:
        group = replace(problem.group, budget_bytes=problem.group.budget_bytes + more)
        return bool(Interleaved(replace(problem, group=group)).solve_below(inf, 1, lambda _: None))

    low, high = bound.missing_bytes, 2 * bound.missing_bytes if below is None else below - 1
    while not fits_with(high):
        if below is not None or high > _LARGEST_BYTES:
            return None
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_with(middle) else (middle + 1, high)
    return bound._replace(missing_bytes=low)


def _lacking(
    instance: Instance, reason: str, node_type: str, missing_bytes: int, exact: bool, file: Path
) -> Infeasible:
    """Return the answer that no plan fits: `reason`, and the memory of the node type that would be enough.

    `missing_bytes`: by how much a rank exceeds its budget; a lower bound unless `exact`.
    """
    cluster, request = instance.costs.cluster, instance.request
    min_bytes = budgets_of(request, cluster, file)[node_type] + missing_bytes
    # Rounded up to a number that is read back as enough.
    min_gib = ceil((min_bytes / GIB + request.reserve_gib) * 1e6) / 1e6
    amount = f"{'at least' if exact else 'more than'} {min_gib:.6f}"
    remedy = f"raise memory_gib to {amount}"
    if min_gib * GIB > cluster.node_types[node_type].memory_bytes:
        remedy = f"take devices of {amount} GiB"
    return Infeasible(f"no plan fits: {reason}: {remedy}", missing_bytes, min_bytes, exact)


def states_beyond_budget(instance: Instance) -> int:
    """Return by how many bytes a rank's share of all states exceeds its budget when fully sharded; 0: it fits.

    States are all parameters as stored, and for trained ones the gradients in the smaller format and, unless offloaded,
    the optimizer's states.
    """
    costs, counts = instance.costs, Counter(instance.costs.cluster.node_type_of_rank)
    stored, reduced = ITEMSIZE[costs.precision.parameters], ITEMSIZE[costs.precision.reduce]
    parameters, trained = costs.model.parameter_count, costs.model.trained_count
    base = costs.precision.base
    frozen = stored if base is UNSET else BASE_BITS[base] / 8
    states = trained * (stored + min(stored, reduced)) + int((parameters - trained) * frozen)
    if not instance.request.offloads_optimizer:
        states += costs.optimizer.state_bytes(trained * stored, costs.precision.parameters)
    budgets = sum(count * instance.budgets[name] for name, count in counts.items())
    return max(0, (states - budgets) // counts.total())


def _by_division(instance: Instance, file: Path) -> Infeasible:
    """Return the excess of fully sharded states, a lower bound of any plan's excess, which may be 0."""
    missing, roomiest = states_beyond_budget(instance), max(instance.budgets, key=instance.prices.with_process)
    if missing == 0:
        problem = "how much memory is missing was not known when the search was stopped: give it more time"
        budget = budgets_of(instance.request, instance.costs.cluster, file)[roomiest]
        return Infeasible(f"no plan fits: {problem}", 0, budget, False)
    missing_bytes = int(missing * instance.costs.profiles_on(roomiest).memory_factor)
    devices = instance.costs.cluster.num_devices
    reason = (
        f"states sharded over all {devices} ranks, without activations, exceed the budget by more than {missing_bytes} "
        "bytes a rank"
    )
    return _lacking(instance, reason, roomiest, missing_bytes, False, file)


def _of_chunks(instance: Instance, configuration: Configuration) -> Shortfall:
    """Return a lower bound of the excess of a configuration of several chunks that has no plan."""
    from shardwright_search.solver.interleaved_problem import InterleavedBounds

    missing = InterleavedBounds(instance.interleaved_problem(configuration)).missing_bytes
    stage = missing.index(max(missing)) * (configuration.pp_size - 1)
    return Shortfall(configuration, stage, instance.node_type(configuration, 0), max(1, *missing))
