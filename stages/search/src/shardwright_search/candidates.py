"""Plans with their predictions, and the choice of runners-up."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shardwright.types import Plan
from shardwright_search.alternatives import other_configurations
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.stopping import latest, soon
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace

_MAX_RUNNERS_UP = 5


class Candidate(NamedTuple):
    """A plan and its prediction."""

    plan: Plan
    evaluation: Evaluation

    @property
    def sample_s(self) -> float:
        """Return the simulated time of a sample."""
        return self.evaluation.estimate.simulated_step_time_s / self.plan.global_batch_size


def candidate_of(instance: Instance, best: Best[Configuration], timeline: bool = False) -> Candidate:
    """Return a plan of the search with its prediction; events only with `timeline`."""
    plan = instance.plan(best.target.configuration, best.priced.solution)
    return Candidate(plan, evaluate(plan, instance.costs.profiles, instance.costs, timeline=timeline))


def is_short(configuration: Configuration) -> bool:
    """Return whether a step has so few passes that a timeline holds them all."""
    num_stages = configuration.pp_size
    return has_timeline(num_stages * configuration.num_chunks, num_stages, configuration.num_microbatches)


def best_elsewhere(
    space: SearchSpace, optimum: Optimum[Configuration], first: Best[Configuration], deadline: float
) -> tuple[Best[Configuration], ...]:
    """Return the best plans of other configurations than the first plan's, as many as time and Ctrl-C allow."""
    if optimum.stopped:
        return ()
    plans, _ = latest(accumulate((best,) for best in other_configurations(space, optimum, first)), soon(deadline))
    return plans or ()


def runners_up(instance: Instance, chosen: Plan, others: Sequence[Best[Configuration]]) -> tuple[Candidate, ...]:
    """Return a few plans that differ from the chosen one and from one another in effect, by ascending closed form."""
    decisions = {_decision(chosen)}
    taken: list[Candidate] = []
    for other in others:
        plan = instance.plan(other.target.configuration, other.priced.solution)
        if len(taken) < _MAX_RUNNERS_UP and (decision := _decision(plan)) not in decisions:
            decisions.add(decision)
            taken.append(candidate_of(instance, other))
    return tuple(sorted(taken, key=lambda c: c.evaluation.objective_ps / c.plan.global_batch_size))


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Return a plan's pipeline degree, and the degrees and recomputation of its layers."""
    splits = {(each.tp_size, each.cp_size, each.recompute) for each in plan.layers}
    return len(plan.stages), plan.schedule.interleaves, frozenset(splits)


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return what distinguishes a plan's execution; names do not, nor does the schedule with one micro-batch."""
    schedule = plan.schedule if plan.num_microbatches > 1 else None
    return plan.stages, plan.embedding, plan.head, plan.layers, plan.global_batch_size, plan.num_microbatches, schedule
