"""Labels of pipeline stages that were found before: the parts of a configuration differ in one stage each."""

from operator import le
from typing import NamedTuple

from shardwright_search.solver.configuration_bounds import StageKind, TargetRun
from shardwright_search.solver.problem import Start
from shardwright_search.solver.stage_labels import RunLabels, StageLabels
from shardwright_search.solver.stage_options import GroupCosts, Weights


class _Stage(NamedTuple):
    """The facts that labels of stages of one configuration and its parts depend on; equal costs are the same object."""

    costs: GroupCosts
    start: Start
    weights: tuple[Weights, ...]


class _Found(NamedTuple):
    """The costs that runs had to stay below, and their labels."""

    caps: dict[int, tuple[float, ...]]
    labels: dict[int, RunLabels]


class KnownLabels:
    """The labels of the stages of a configuration and its parts, as they were last found."""

    def __init__(self) -> None:
        self._known: dict[_Stage, _Found] = {}

    def reaching(self, kind: StageKind, stage: StageLabels, targets: list[TargetRun]) -> dict[int, RunLabels]:
        """Return `stage.reaching`, recomputed only if some run may cost more than when labels were last found."""
        key, caps = _Stage(stage.costs, kind.start, stage.weights), {target.run: target.caps for target in targets}
        known = self._known.get(key)
        if known is None or not all(run in known.caps and all(map(le, caps[run], known.caps[run])) for run in caps):
            known = self._known[key] = _Found(caps, stage.reaching(targets))
        labels = ((target, known.labels.get(target.run)) for target in targets)
        return {target.run: stage.below(each, target) for target, each in labels if each is not None}
