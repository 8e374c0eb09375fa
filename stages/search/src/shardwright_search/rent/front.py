"""The exact front of step time against price per step over sub-clusters, each with its best plan.

A sub-cluster's price falls with its step time, so one plan serves both: the fastest. A sub-cluster is solved only below
the time from which on some point of the front is as fast and as cheap; most are ruled out by their bounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, product
from math import inf, prod
from operator import mul
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.display.units import TimeLeft
from shardwright.io import BadInput
from shardwright.types import Cluster, Model, NodeGroup
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.search import Report, listed
from shardwright_search.solver.branch_and_bound import exhaust
from shardwright_search.solver.stopping import latest, soon
from shardwright_search.solver.targets import Best, Solvable, Target
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.request import BatchRange, Objective, Offer, Offers, SearchRequest, StageWidths
from shardwright_search.space.search_space import SearchSpace, Unlisted, space_of

# All sub-clusters that can be rented, with their prices.


MAX_SUB_CLUSTERS = 100_000


class SubCluster(NamedTuple):
    """A subset of a cluster's nodes, and its price."""

    cluster: Cluster
    counts: tuple[int, ...]
    """Nodes of each type, in the order of `node_types_of` the whole cluster."""
    usd_per_hour: float

    @property
    def name(self) -> str:
        """Return the sub-cluster's nodes in words, such as 2xp4d+1xg5."""
        return "+".join(f"{group.count}x{group.node_type}" for group in self.cluster.nodes)


def node_types_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the node types that a cluster has nodes of, in the order of its ranks."""
    return tuple(dict.fromkeys(group.node_type for group in cluster.nodes))


def sub_clusters(cluster: Cluster, offers: Offers, cluster_file: Path, offers_file: Path) -> tuple[SubCluster, ...]:
    """Return all that can be rented, the smallest first.

    Raises BadInput for a node type without a price, for a name that leads out of the folder of plans, and for offers
    that the cluster file does not have.
    """
    names = node_types_of(cluster)
    most = {name: sum(group.count for group in cluster.nodes if group.node_type == name) for name in names}
    _check(cluster, offers, most, cluster_file, offers_file)
    by_type = [offers.node_types.get(name, Offer()) for name in names]
    prices = [_usd_per_hour(cluster, name, offer) or 0.0 for name, offer in zip(names, by_type, strict=True)]
    possible = [
        range(most[name] + 1) if offer.counts is None else sorted(set(offer.counts))
        for name, offer in zip(names, by_type, strict=True)
    ]
    if (total := prod(map(len, possible))) > MAX_SUB_CLUSTERS:
        raise BadInput(offers_file, f"{total} sub-clusters, more than {MAX_SUB_CLUSTERS}", "list fewer counts")
    if not any(map(any, possible)):
        raise BadInput(offers_file, "counts: there are no nodes", "list a count above 0")
    offered = (
        SubCluster(
            _of_counts(cluster, dict(zip(names, counts, strict=True))),
            counts,
            sum(map(mul, counts, prices)),
        )
        for counts in product(*possible)
        if any(counts)
    )
    return tuple(sorted(offered, key=lambda each: (each.cluster.num_devices, each.counts)))


def _of_counts(cluster: Cluster, left: dict[str, int]) -> Cluster:
    """Return the first nodes of each type, in the order of the whole cluster."""
    nodes = []
    for group in cluster.nodes:
        taken = min(group.count, left[group.node_type])
        left = left | {group.node_type: left[group.node_type] - taken}
        if taken:
            nodes.append(NodeGroup(node_type=group.node_type, count=taken))
    return replace(cluster, nodes=tuple(nodes))


def _usd_per_hour(cluster: Cluster, name: str, offer: Offer) -> float | None:
    return cluster.node_types[name].usd_per_hour if offer.usd_per_hour is None else offer.usd_per_hour


def _check(cluster: Cluster, offers: Offers, most: dict[str, int], cluster_file: Path, offers_file: Path) -> None:
    for name, offer in offers.node_types.items():
        if name not in most:
            problem = f"node_types names {name!r}, cluster {cluster.name} has {', '.join(most)}"
            raise BadInput(offers_file, problem, "name its node types")
        if offer.counts is not None and max(offer.counts) > most[name]:
            problem = f"counts of {name}: {max(offer.counts)} nodes, cluster {cluster.name} has {most[name]}"
            raise BadInput(offers_file, problem, "list at most that many, or add nodes to the cluster file")
    for name in most:
        if "/" in name:
            problem = f"node type {name!r} contains a '/', but plan files are named after node types"
            raise BadInput(cluster_file, problem, "choose another name")
        if _usd_per_hour(cluster, name, offers.node_types.get(name, Offer())) is None:
            problem = f"node type {name} has no usd_per_hour"
            raise BadInput(cluster_file, problem, "add it, there or in an offers file")


# The front.


_NEEDED = "pp_sizes", "tp_sizes", "cp_sizes"
"""Lists of degrees of which at least one must fit a sub-cluster."""
_MAX_RECENT = 6
_HOUR_S = 3600.0
_PS = 1e-12


class Rented(NamedTuple):
    """A configuration on one of the sub-clusters."""

    sub_cluster: int
    configuration: Configuration


class RentalPrice(NamedTuple):
    """The time and the price of a step on a sub-cluster."""

    step_s: float
    usd: float

    def dominates(self, other: "RentalPrice") -> bool:
        """Return whether time and price are both no larger than the other time and price, and one is smaller."""
        return self.step_s <= other.step_s and self.usd <= other.usd and self != other


class SubClusterAnswer(NamedTuple):
    """The fastest plan of a sub-cluster, or a bound on it."""

    sub_cluster: SubCluster
    bound_s: float
    """None of its plans has a closed form below this, or one that has is dominated; infinity: it has no plan."""
    best: Best[Rented] | None
    """The fastest plan, if it had to be found."""
    price: RentalPrice
    """The price of the fastest plan; if it was not found, the price at the bound, which is then dominated."""
    on_front: bool
    is_open: bool
    """Whether the answer is not final: the search was stopped, or some configurations were only bounded."""


class Front(NamedTuple):
    """The answers for all sub-clusters, in their order."""

    answers: tuple[SubClusterAnswer, ...]
    spaces: Mapping[int, SearchSpace]
    unlisted: Mapping[int, Unlisted]
    """Configurations that were only bounded and may have a better plan, by sub-cluster."""
    looked_at: int
    solved: int
    stopped: bool

    @property
    def points(self) -> list[int]:
        """Numbers of the sub-clusters on the front, the fastest first."""
        numbers = (number for number, answer in enumerate(self.answers) if answer.on_front)
        return sorted(numbers, key=lambda number: self.answers[number].price)

    def dominating(self, number: int) -> int | None:
        """Return the point of the front that is as fast and as cheap as a sub-cluster, the nearest in time."""
        price = self.answers[number].price
        better = (point for point in self.points if self.answers[point].price.dominates(price))
        return max(better, key=lambda point: self.answers[point].price, default=None)


def check_rentable(request: SearchRequest, file: Path) -> None:
    """Raise BadInput, naming the search file, for requests that have no price per step or hold for one cluster only."""
    if isinstance(request.global_batch_size, BatchRange):
        raise BadInput(file, "global_batch_size: a range has no price per step", "give one batch size")
    if isinstance(request.stage_widths, tuple):
        raise BadInput(file, "stage_widths: listed widths fit only one cluster", "use equal or any")
    if found := [schedule for schedule in request.schedules if not is_solved(schedule)]:
        raise BadInput(file, f"schedules: {found[0]} is found behind one search, not along a front", "leave it out")


def find_front(
    request: SearchRequest,
    model: Model,
    offered: Sequence[SubCluster],
    profiles: Profiles,
    file: Path,
    report: Report,
    time_limit_s: float | None = None,
) -> Front:
    """Return the fastest plan of each sub-cluster that may be on the front."""
    deadline = inf if time_limit_s is None else monotonic() + time_limit_s
    asked = replace(request, objective=Objective.STEP_TIME)
    spaces = listed(lambda: _spaces(asked, model, offered, profiles, file), file, deadline)
    targets = [_rented(number, target) for number, space in spaces.items() for target in space.listed]
    prices = Prices([sub_cluster.usd_per_hour for sub_cluster in offered])
    report(f"bounding {len(targets)} configurations of {len(spaces)} sub-clusters")

    time_left = TimeLeft()

    def progress(bound: float, left: int) -> None:
        points = f"{len(prices.front)} points: above {bound * 1e-9:.6g} ms a step"
        report(f"{left} configurations left, {points}{time_left.words(left)}")

    done = exhaust(targets, _solvable_of(spaces), prices.limit, prices.take, deadline, progress)
    if done.stopped and not prices.front and (plain := latest(_plain(spaces), soon(0.0))[0]) is not None:
        prices.take(plain)
    bounds, unlisted = [inf] * len(offered), dict[int, Unlisted]()
    for target, bound in zip(targets, done.bounds, strict=True):
        number = target.configuration.sub_cluster
        bounds[number] = min(bounds[number], bound)
    for number, space in spaces.items():
        if (left := space.open_below(prices.limit_of(number))) is not None:
            bounds[number], unlisted[number] = min(bounds[number], left.bound), left
    open_ = {targets[number].configuration.sub_cluster for number in done.open} | unlisted.keys()
    answers = (prices.answer(number, each, bounds[number], number in open_) for number, each in enumerate(offered))
    return Front(tuple(answers), spaces, unlisted, done.looked_at, done.solved, done.stopped)


def _plain(spaces: dict[int, SearchSpace]) -> Iterator[Best[Rented]]:
    """Yield a plain plan of the largest sub-cluster that has one."""
    plans = ((number, space.plain(space.listed)) for number, space in reversed(spaces.items()))
    yield from islice((Best(_rented(n, best.target), best.priced, best.score) for n, best in plans if best), 1)


def _rented(number: int, target: Target[Configuration]) -> Target[Rented]:
    return Target(Rented(number, target.configuration), target.offset_ps, target.scale)


class Prices:
    """The points known so far, and the limits that they set for other plans."""

    def __init__(self, usd_per_hour: Sequence[float]) -> None:
        self._usd_per_hour = usd_per_hour
        self._best: dict[int, Best[Rented]] = {}
        self._limits: dict[int, float] = {}
        self.front: dict[int, RentalPrice] = {}

    def price(self, number: int, score_ps: float) -> RentalPrice:
        """Return the time and price of a step with this score, its picoseconds, on a sub-cluster."""
        step_s = score_ps * _PS
        return RentalPrice(step_s, step_s / _HOUR_S * self._usd_per_hour[number])

    def limit(self, target: Target[Rented]) -> float:
        """Return the limit of a target's sub-cluster."""
        return self.limit_of(target.configuration.sub_cluster)

    def limit_of(self, number: int) -> float:
        """Return the score from which on a plan of a sub-cluster is dominated, or not better than the known one."""
        if number not in self._limits:
            usd_per_s, within = self._usd_per_hour[number] / _HOUR_S, inf
            for price in self.front.values():
                as_dear = price.usd / usd_per_s if usd_per_s else (0.0 if price.usd == 0 else inf)
                within = min(within, max(price.step_s, as_dear))
            limit = within / _PS
            self._limits[number] = min(limit, self._best[number].score) if number in self._best else limit
        return self._limits[number]

    def take(self, best: Best[Rented]) -> None:
        """Add a plan to the front, and remove the points that it dominates."""
        number = best.target.configuration.sub_cluster
        self._best[number], self._limits = best, {}
        new = self.price(number, best.score)
        others = {other: price for other, price in self.front.items() if other != number}
        if not any(price.dominates(new) or price == new for price in others.values()):
            self.front = {other: price for other, price in others.items() if not new.dominates(price)} | {number: new}

    def answer(self, number: int, sub_cluster: SubCluster, bound_ps: float, is_open: bool) -> SubClusterAnswer:
        """Return the answer for a sub-cluster at the end of the search."""
        best = self._best.get(number)
        price = self.price(number, bound_ps if best is None else best.score)
        return SubClusterAnswer(sub_cluster, bound_ps * _PS, best, price, number in self.front, is_open)


def _spaces(
    request: SearchRequest, model: Model, offered: Sequence[SubCluster], profiles: Profiles, file: Path
) -> dict[int, SearchSpace]:
    """Return the search space of each sub-cluster that has plans; equal parts are priced once."""
    spaces: dict[int, SearchSpace] = {}
    for number, (cluster, *_) in reversed(list(enumerate(offered))):
        if (asked := _asked_of(request, cluster)) is not None:
            types, instances = set(node_types_of(cluster)), (space.instance for space in spaces.values())
            known = next((known for known in instances if types.issubset(node_types_of(known.costs.cluster))), None)
            spaces[number] = space_of(asked, model, cluster, profiles, file, known)
            _ = spaces[number].unlisted, spaces[number].listed
    return dict(sorted(spaces.items()))


def _asked_of(request: SearchRequest, cluster: Cluster) -> SearchRequest | None:
    """Return the request without numbers that do not divide a sub-cluster's devices; None if nothing is left."""
    devices, equal = cluster.num_devices, request.stage_widths is StageWidths.EQUAL

    def fitting(numbers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if numbers is None:
            return None
        return tuple(number for number in numbers if (devices % number == 0 if equal else number <= devices))

    lists = {name: fitting(getattr(request, name)) for name in (*_NEEDED, "shard_sizes", "ep_sizes", "etp_sizes")}
    if () in (lists[name] for name in _NEEDED):
        return None
    memory = request.memory_gib
    if isinstance(memory, Mapping):
        memory = {name: gib for name, gib in memory.items() if name in node_types_of(cluster)} or None
    return replace(request, **lists | {"shard_sizes": lists["shard_sizes"] or None, "memory_gib": memory})


def _solvable_of(spaces: Mapping[int, SearchSpace]) -> Callable[[Rented], Solvable]:
    """Return a function that prepares a configuration on its sub-cluster for solving; it caches the last few."""
    return lru_cache(_MAX_RECENT)(lambda rented: spaces[rented.sub_cluster].deferred(rented.configuration))
