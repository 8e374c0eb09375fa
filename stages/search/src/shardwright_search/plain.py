"""What a search answers that was stopped before it knew a plan."""

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from time import monotonic

from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.feasible import plain_plan
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import StageWidths

_MAX_PLAIN = 20
_EQUAL_S = 5.0
"""How long such plans are looked for, and those of equal widths where any widths were asked for."""


def plain_best(instance: Instance, targets: Iterable[Target[Configuration]]) -> Best[Configuration] | None:
    """The best of some plain plans of configurations with one chunk; None: none fits.

    Where stages may be of any widths, the best plan of equal widths that is soon found: their places are few.
    """
    single = [target for target in targets if target.configuration.num_chunks == 1]
    if instance.request.stage_widths is not StageWidths.ANY:
        return _plain(instance, single)
    equal = tuple(dict.fromkeys(own for target in single for own in _of_equal_width(instance, target)))
    best = optimize(equal, instance.solvable, deadline=monotonic() + _EQUAL_S, wide=True).best
    return best or _plain(instance, equal) or _plain(instance, single)


def _plain(instance: Instance, targets: Iterable[Target[Configuration]]) -> Best[Configuration] | None:
    deadline = monotonic() + _EQUAL_S
    soon = takewhile(lambda _: monotonic() < deadline, targets)
    found = ((target, plain_plan(instance.problem(target.configuration))) for target in soon)
    plans = (Best(target, plan, target.score(plan.objective_ps)) for target, plan in found if plan is not None)
    return min(islice(plans, _MAX_PLAIN), key=lambda best: best.score, default=None)


def _of_equal_width(instance: Instance, target: Target[Configuration]) -> Iterator[Target[Configuration]]:
    """The same with stages of equal width, if there are such."""
    own = target.configuration._replace(widths=StageWidths.EQUAL)
    if instance.costs.cluster.num_devices % own.pp_size == 0 and instance.choices.has_plans(own):
        yield target._replace(configuration=own)
