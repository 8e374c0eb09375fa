"""Changed searches: other kinds of plans, more memory or nodes, faster links, smaller batches."""

from collections.abc import Iterable, Iterator
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import Cluster, Model, Plan, Recompute
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.profiles import Profiles, Scaling, scaled
from shardwright_search.search import SearchAnswer, StoppedEarly, find_best
from shardwright_search.solver.stopping import CpuSeconds, Stopped, expired, latest, left, soon, until
from shardwright_search.space.budget import Infeasible, any_fits, states_beyond_budget
from shardwright_search.space.configurations import NO_DEMANDS, configurations, divisors, narrowed
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import OuterSpace, SearchRequest, Space, batch_sizes, of_each_optimizer, runnable
from shardwright_search.space.search_space import space_of

_MORE_MEMORY = 1.1
_FASTER_LINKS = 2.0
_MUCH_FASTER = 1.1
"""How many times the samples a second of the plan another batch size must give to be named."""
_NEAR_BATCH = 0.25
"""The largest share by which such a batch size may differ from the requested one."""
_BATCH_LIMIT_S = 1.0
"""CPU seconds in which a plan for another batch size is searched: a plan that is much faster will do."""


class WhatIf(NamedTuple):
    """A search that differs from the one that made a plan."""

    difference: str
    """Difference from that search, in a few words."""
    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    file: Path
    """File of the request, named in errors."""


class WhatIfAnswer(NamedTuple):
    """The best plan; or by how much no plan fits; or why there is none, or no price for it."""

    difference: str
    result: SearchAnswer | Infeasible | BadInput

    @property
    def stopped(self) -> bool:
        """Return whether the search was stopped before it was done."""
        return isinstance(self.result, StoppedEarly) or (
            isinstance(self.result, SearchAnswer | Infeasible) and self.result.stopped
        )


def answer(question: WhatIf, time_limit_s: float | None = None, priced: Instance | None = None) -> WhatIfAnswer:
    """Return the result of a search without reporting progress; BadInput that it raises is a result, too.

    `priced` as for `find_best`.
    """
    difference, request, model, cluster, profiles, file = question
    try:
        result = find_best(request, model, cluster, profiles, file, lambda _: None, time_limit_s, NO_DEMANDS, priced)
        return WhatIfAnswer(difference, result)
    except BadInput as error:
        return WhatIfAnswer(difference, error)


def neighbours(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[WhatIf, ...]:
    """Return searches of one kind of plan each: without recomputation, with one strategy, of one pipeline degree, ...

    Degrees and counts are all in the request's space except the plan's own; counts are for the plan's batch size.
    """
    kinds = _kinds(plan, runnable(narrowed(request, plan.cluster), plan.model, plan.cluster, file), file)
    return tuple(WhatIf(kind, changed, plan.model, plan.cluster, profiles, file) for kind, changed in kinds)


def _kinds(plan: Plan, asked: SearchRequest, file: Path) -> Iterator[tuple[str, SearchRequest]]:
    """Yield the changes of a narrowed request; data parallelism only is a named space, without demands on the ends."""
    yield "no recomputation", replace(asked, recompute=(Recompute.NONE,))
    yield "one strategy for all layers", replace(asked, fine_grained=False)
    if asked.shard_sizes is not None:
        yield "states sharded over all ranks", replace(asked, shard_sizes=None)
    if asked.cp_sizes != (1,):
        embedding, head = (replace(outer, cp_sizes=None) for outer in (asked.embedding, asked.head))
        yield "no context parallelism", replace(asked, cp_sizes=(1,), embedding=embedding, head=head)
        for kind in asked.context if len(asked.context) > 1 else ():
            yield f"context {kind} alone", replace(asked, context=(kind,))
    yield from _kinds_with_experts(plan, asked)
    alone = replace(asked, embedding=OuterSpace(), head=OuterSpace(), max_pp_size=None, max_dp_size=None)
    yield "data parallelism only", replace(alone, space=Space.DP)
    yield "ZeRO only", replace(alone, space=Space.ZERO)
    listed = configurations(asked, plan.model, plan.cluster, file)
    for pp_size in sorted({each.pp_size for each in listed} - {len(plan.stages)}):
        yield f"pp_size {pp_size}", replace(asked, pp_sizes=(pp_size,))
    fixed = replace(asked, global_batch_size=plan.global_batch_size)
    counts = {each.num_microbatches for each in listed if each.global_batch_size == plan.global_batch_size}
    for count in sorted(counts - {plan.num_microbatches}):
        yield f"{count} microbatch(es)", replace(fixed, num_microbatches=(count,))


def _kinds_with_experts(plan: Plan, asked: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield requests with other experts: sharded as their layer, other degrees, or no folding.

    Nothing is folded if experts' features are sharded as the rest of the layer, and ep_size divides dp_size.
    """
    if not asked.ep_sizes:
        return
    yield "experts sharded as the rest of their layer", replace(asked, ep_sizes=())
    chosen = {layer.experts.ep_size for layer in plan.layers if layer.experts is not UNSET}
    for ep_size in sorted({*asked.ep_sizes} - chosen):
        yield f"ep_size {ep_size} or none", replace(asked, ep_sizes=(ep_size,))
    for tp_size in asked.tp_sizes or divisors(plan.cluster.num_devices):
        yield f"no folding: tp_size = etp_size = {tp_size}", replace(asked, tp_sizes=(tp_size,), etp_sizes=(tp_size,))


def outlook(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[WhatIf, ...]:
    """Return searches with 10 % more memory, with links twice as fast, and with one more node of each group."""
    model, cluster = plan.model, plan.cluster
    larger, roomier = more_memory(request, cluster, _MORE_MEMORY)
    faster = faster_links(profiles, _FASTER_LINKS)
    nodes = ((f"one more {group.node_type} node", more_nodes(cluster, i, 1)) for i, group in enumerate(cluster.nodes))
    return (
        WhatIf(f"{_MORE_MEMORY - 1:.0%} more memory", larger, model, roomier, profiles, file),
        WhatIf(f"links {_FASTER_LINKS:g} times as fast", request, model, cluster, faster, file),
        *(WhatIf(difference, request, model, wider, profiles, file) for difference, wider in nodes),
    )


def more_memory(request: SearchRequest, cluster: Cluster, factor: float) -> tuple[SearchRequest, Cluster]:
    """Return the budget, and the devices' memory that limits it, multiplied by a factor; the reserve is unchanged."""
    match request.memory_gib:
        case dict() as budgets:
            budget: dict[str, float] | float | None = {name: gib * factor for name, gib in budgets.items()}
        case budget_gib:
            budget = budget_gib and budget_gib * factor
    types = {
        name: replace(node, memory_bytes=ceil(node.memory_bytes * factor)) for name, node in cluster.node_types.items()
    }
    return replace(request, memory_gib=budget), replace(cluster, node_types=types)


def faster_links(profiles: Profiles, factor: float) -> Profiles:
    """Return profiles whose messages, and the measured cost of gradient reduction, take 1 / factor of the time.

    Messages of tensor and sequence parallelism inside a layer stay: a model profile has them in one number with the
    computation.
    """
    return profiles.each(partial(scaled, by=Scaling(collectives=1 / factor, reduction=1 / factor)))


def more_nodes(cluster: Cluster, group: int, count: int) -> Cluster:
    """Return the cluster with `count` more nodes in one of its groups."""
    nodes = list(cluster.nodes)
    nodes[group] = replace(nodes[group], count=nodes[group].count + count)
    return replace(cluster, nodes=tuple(nodes))


class Remedies(NamedTuple):
    """Changes of an infeasible request, each of which makes it feasible by itself; None if none is known."""

    global_batch_size: int | None
    """The largest divisor of the batch size, or of the smallest in a range, that fits."""
    nodes: int | None
    """The least number of nodes that fits and that the profiles cover; known for clusters of equal nodes."""


def better_batches(question: WhatIf, searched: SearchAnswer, deadline: float) -> Iterator[Candidate]:
    """Yield plans of similar batch sizes that all devices divide, if much faster for each sample.

    `searched`: the answer to the question, whose batch size they do not divide. A bound rules most sizes out, without a
    search; the others are searched for `_BATCH_LIMIT_S`. The search ends at `deadline` or Ctrl-C.
    """
    sizes, devices = batch_sizes(question.request), question.cluster.num_devices
    if len(sizes) > 1 or sizes[0] % devices == 0 or searched.stopped:
        return
    (asked,) = sizes
    priced = searched.instance if len(of_each_optimizer(question.request)) == 1 else None
    for size in (asked // devices * devices, -(-asked // devices) * devices):
        changed = question._replace(request=replace(question.request, global_batch_size=size))
        if size == 0 or abs(size - asked) > _NEAR_BATCH * asked:
            continue
        wanted_s = searched.chosen.sample_s / _MUCH_FASTER
        maybe, _ = latest((_may_take_less(each, priced, wanted_s) for each in (changed,)), deadline)
        if maybe is None:
            return
        if maybe:
            left_s = left(deadline)
            ends = until(CpuSeconds(_BATCH_LIMIT_S) if left_s is None else min(left_s, CpuSeconds(_BATCH_LIMIT_S)))
            _, result = other = answer(changed, left(ends), priced)
            if isinstance(result, SearchAnswer) and result.chosen.sample_s < wanted_s:
                yield result.chosen
            # With time left, it was Ctrl-C that ended the search.
            if other.stopped and not expired(ends):
                return


def _may_take_less(question: WhatIf, priced: Instance | None, sample_s: float) -> bool:
    """Return whether the bounds allow a plan that takes less time per sample; False if the request is refused."""
    _, request, model, cluster, profiles, file = question
    if len(each := of_each_optimizer(request)) > 1:
        return any(_may_take_less(question._replace(request=one), priced, sample_s) for one in each)
    limit_ps = sample_s * 1e12 * min(batch_sizes(request))
    try:
        space = space_of(request, model, cluster, profiles, file, priced)
        return any(space.solvable(each.configuration).relaxed_bound_ps < limit_ps for each in space.targets)
    except BadInput:
        return False


def remedies(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path, deadline: float = inf
) -> Remedies:
    """Return the remedies found in time: smaller batches, the largest first, then more nodes, the fewest first."""

    def first_that_fits(tried: Iterable[tuple[int, SearchRequest, Cluster]]) -> int | None:
        fitting = (n for n, changed, wide in tried if fits(changed, model, wide, profiles, file, deadline))
        return next(fitting, None)

    def search() -> Iterator[Remedies]:
        batches = reversed(divisors(min(batch_sizes(request)))[:-1])
        smaller = first_that_fits((size, replace(request, global_batch_size=size), cluster) for size in batches)
        yield Remedies(smaller, None)
        counts = _more_nodes(cluster, profiles)
        wider = ((count, request, more_nodes(cluster, 0, count - cluster.nodes[0].count)) for count in counts)
        yield Remedies(smaller, first_that_fits(wider))

    return latest(search(), soon(deadline))[0] or Remedies(None, None)


def further_remedies(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path, deadline: float = inf
) -> str:
    """Return the remedies of an infeasible request as the end of its one line; empty if there are none."""
    batch, nodes = remedies(request, model, cluster, profiles, file, deadline)
    words = "" if batch is None else f", or lower global_batch_size to {batch}, the largest divisor that fits"
    return words if nodes is None else f"{words}, or take {nodes} nodes of {cluster.nodes[0].node_type}"


def _more_nodes(cluster: Cluster, profiles: Profiles) -> range:
    """Return larger numbers of nodes of a homogeneous cluster, up to the largest group that was measured."""
    group, *others = cluster.nodes
    hardware = profiles.used(cluster)[0].hardware
    largest = max((key.group_size for key in hardware.curves), default=0)
    most = largest // cluster.node_types[group.node_type].devices_per_node
    return range(0) if others else range(group.count + 1, most + 1)


def fits(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path, deadline: float
) -> bool:
    """Return whether some plan fits; a request that is refused, or not covered by the profiles, is no remedy."""
    if len(each := of_each_optimizer(request)) > 1:
        return any(fits(one, model, cluster, profiles, file, deadline) for one in each)
    try:
        space = space_of(request, model, cluster, profiles, file)
        if states_beyond_budget(space.instance) > 0:
            return False
        listed = [target.configuration for target in space.targets]
        single = [configuration for configuration in listed if configuration.num_chunks == 1]
        if any_fits(space.instance, single):
            return True
        if len(single) == len(listed):
            return False
        # The need of several chunks is only known by searching.
        left_s = left(deadline)
        return not isinstance(find_best(request, model, cluster, profiles, file, lambda _: None, left_s), Infeasible)
    except StoppedEarly:
        raise Stopped from None
    except BadInput:
        return False
