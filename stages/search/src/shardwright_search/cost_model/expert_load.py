"""The load of experts under expert parallelism, logged by a run or a stated ratio, and their assignment to ranks."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from shardwright.io import BadInput, read_document
from shardwright.plan.expert_placement import imbalances, load_misfit
from shardwright.types import MAX_DEVICES, ExpertLoad, Model


class LoadFile(NamedTuple):
    """A load of experts that a run logged, and its file."""

    path: Path
    load: ExpertLoad

    def imbalance(self, model: Model, type_name: str, ep_size: int) -> float:
        """Return the ratio of the fullest group's rows to the mean group's, for `ep_size` groups of experts."""
        return imbalances(self.load, model, ep_size)[type_name]

    def placed_imbalance(self, layer: int, groups: Sequence[Sequence[int]]) -> float:
        """Return this ratio for the given groups of one layer's experts; raise BadInput if the run did not log it."""
        for one in self.load.layers:
            if one.layer == layer:
                return one.placed_imbalance(groups)
        problem = f"has no load of layer {layer}, whose experts the plan places"
        raise BadInput(self.path, problem, "give the load of a run that logged every layer")

    def check(self, model: Model) -> None:
        """Raise BadInput if the load does not belong to the experts of a model."""
        if (problem := load_misfit(self.load, model)) is not None:
            raise BadInput(self.path, f"does not fit: {problem}", "give the load of a run of this model")


class StatedLoad(NamedTuple):
    """A load of experts that is stated as one number for all layers."""

    ratio: float
    """Ratio of the fullest group's rows to the mean group's: at least 1."""

    def imbalance(self, _model: Model, _type_name: str, ep_size: int) -> float:
        """Return the ratio, but at most `ep_size`, with which one group has all rows."""
        return min(self.ratio, float(ep_size))

    def placed_imbalance(self, _layer: int, groups: Sequence[Sequence[int]]) -> float:
        """Return the ratio, which holds for experts wherever they are."""
        return min(self.ratio, float(len(groups)))

    def check(self, _model: Model) -> None:
        """Accept any model: a ratio does not depend on it."""


Load = LoadFile | StatedLoad


def read_load(text: str) -> Load:
    """Return the load given by `--imbalance`; raise BadInput if it is neither a ratio nor a load file."""
    try:
        ratio = float(text)
    except ValueError:
        return LoadFile(Path(text), read_document(Path(text), ExpertLoad))
    if not 1 <= ratio <= MAX_DEVICES:
        remedy = f"give a ratio from 1 to {MAX_DEVICES}, or the load.json of a run"
        raise BadInput("--imbalance", f"{text} is not a ratio of the fullest rank's load to the mean", remedy)
    return StatedLoad(ratio)


# The assignment of a layer's experts to equal groups of ranks that minimizes the fullest group's load.
#
# Loads are whole numbers, so that sums and comparisons are exact. Few experts are assigned by branch and bound, which
# proves the optimum; many by descending load, each to the emptiest group with room (longest processing time first,
# Graham 1969), and then by swaps of two experts until none helps. The distance from the best is at most that from a
# lower bound.


_MOST_EXACT = 16
"""Most experts for which branch and bound is tried."""
_MOST_NODES = 200_000
"""Most partial assignments that branch and bound examines."""

Groups = tuple[tuple[int, ...], ...]


class Assignment(NamedTuple):
    """Experts in groups, ascending inside each, and the groups by their first expert."""

    groups: Groups
    fullest: int
    """Load of the fullest group."""
    bound: int
    """No assignment has a fullest group with less."""


def assign(loads: Sequence[int], groups: int) -> Assignment:
    """Return the assignment of experts with these loads to a number of groups of equal size, which divides them."""
    size = len(loads) // groups
    neighbours = [list(range(first, first + size)) for first in range(0, len(loads), size)]
    swapped = (_swapped(loads, each) for each in (neighbours, _longest_first(loads, groups)))
    fullest, best = min(((fullest_load(loads, each), each) for each in swapped), key=lambda one: one[0])
    bound = lower_bound(loads, groups)
    if bound < fullest and len(loads) <= _MOST_EXACT:
        search = _Search(loads, groups, best)
        best, fullest = search.best, search.fullest
        bound = fullest if search.is_over else bound
    return Assignment(tuple(sorted(tuple(sorted(group)) for group in best)), fullest, bound)


def lower_bound(loads: Sequence[int], groups: int) -> int:
    """Return a load that the fullest group has at least, however experts are assigned.

    The mean is such a load. So is, for each k, the least load of a group with k + 1 of the k x groups + 1 largest
    experts, which some group must have; its other experts have at least the smallest loads.
    """
    size, ordered = len(loads) // groups, sorted(loads, reverse=True)
    smallest = [0, *accumulate(reversed(ordered))]
    counted = ((k * groups + 1, k + 1) for k in range(size))
    crowded = (sum(ordered[end - many : end]) + smallest[size - many] for end, many in counted)
    return max(-(-sum(loads) // groups), *crowded)


def fullest_load(loads: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """Return the load of the fullest group of experts."""
    return max(sum(loads[expert] for expert in group) for group in groups)


def _longest_first(loads: Sequence[int], groups: int) -> list[list[int]]:
    """Return experts by descending load, each in the emptiest group with room."""
    size, found, sums = len(loads) // groups, [list[int]() for _ in range(groups)], [0] * groups
    for expert in sorted(range(len(loads)), key=lambda one: (-loads[one], one)):
        group = min((g for g in range(groups) if len(found[g]) < size), key=lambda g: (sums[g], g))
        found[group].append(expert)
        sums[group] += loads[expert]
    return found


def _swapped(loads: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return groups after swaps of an expert of the fullest group with one of another group.

    A swap leaves both groups below the fullest load, and so lowers the sum of the loads' squares: swaps come to an end.
    The swap with the lowest maximum of both loads goes first.
    """
    found = [list(group) for group in groups]
    sums = [sum(loads[expert] for expert in group) for group in found]
    while True:
        full = max(range(len(found)), key=lambda g: (sums[g], -g))
        swaps = (
            (max(sums[full] - less, sums[g] + less), g, i, j)
            for g in range(len(found))
            for i, mine in enumerate(found[full])
            for j, other in enumerate(found[g])
            if g != full and 0 < (less := loads[mine] - loads[other]) and sums[g] + less < sums[full]
        )
        if (best := min(swaps, default=None)) is None:
            return found
        _, g, i, j = best
        less = loads[found[full][i]] - loads[found[g][j]]
        found[full][i], found[g][j] = found[g][j], found[full][i]
        sums[full], sums[g] = sums[full] - less, sums[g] + less


class _Search:
    """A search of all assignments, largest expert first, without those that cannot be better than the best so far."""

    def __init__(self, loads: Sequence[int], groups: int, best: list[list[int]]) -> None:
        self.best, self.fullest = best, fullest_load(loads, best)
        self._loads, self._size, self._mean = loads, len(loads) // groups, -(-sum(loads) // groups)
        self._order = sorted(range(len(loads)), key=lambda one: (-loads[one], one))
        self._nodes = 0
        self._found, self._sums = [list[int]() for _ in range(groups)], [0] * groups
        self._place(0)

    @property
    def is_over(self) -> bool:
        """Whether all assignments were examined or ruled out."""
        return self._nodes <= _MOST_NODES

    def _place(self, number: int) -> None:
        self._nodes += 1
        if self._nodes > _MOST_NODES or self.fullest == self._mean:
            return
        if number == len(self._order):
            self.best, self.fullest = [list(group) for group in self._found], max(self._sums)
            return
        expert, tried = self._order[number], set[tuple[int, int]]()
        for g, group in enumerate(self._found):
            # Groups with the same number of experts and load are interchangeable.
            state = self._sums[g], len(group)
            after = self._sums[g] + self._loads[expert]
            if len(group) == self._size or state in tried or after >= self.fullest:
                continue
            tried.add(state)
            group.append(expert)
            self._sums[g] = after
            self._place(number + 1)
            self._sums[g] = after - self._loads[expert]
            group.pop()
