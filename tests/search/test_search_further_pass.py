"""A further kind of pass, made up and played: as weight passes are, under another name."""

from itertools import product

import pytest

from shardwright.plan.schedules import registry
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.schedule import ClosedForm, PipelineSchedule
from shardwright.types import Schedule
from shardwright_search.simulation import simulator
from shardwright_search.simulation.simulator import StageTimes, lower_bound_ps, simulate, step_time_ps
from shardwright_search.space.configurations import Configuration
from shardwright_search.step.memory import pass_counts


def _weight() -> Pass:
    """A row that `Pass` does not have: it sends nothing, follows the backward pass, and fills bubbles."""
    row = str.__new__(Pass, "later")
    row._name_, row._value_, row.way, row.needs, row.makes_gradients, row.fill = (
        "LATER",
        "later",
        0,
        "backward",
        1,
        -1,
    )
    return row


WEIGHT = _weight()


class _ZeroBubble(PipelineSchedule):
    """The greedy order of stages that take one unit for each pass.

    A backward pass if its gradient has come, else a forward pass if fewer than p microbatches are held, else a weight
    pass.
    """

    name = Schedule.GPIPE
    kinds = (Pass.FORWARD, Pass.BACKWARD, WEIGHT)

    def num_ahead(self, num_stages, num_microbatches, stage, num_chunks):
        return num_stages

    def actions(self, num_stages, num_microbatches, stage, num_chunks=1):
        lists = [[] for _ in range(num_stages)]
        while any(len(own) < 3 * num_microbatches for own in lists):
            done = [[sum(action.kind is kind for action in own) for kind in self.kinds] for own in lists]
            for at, (forward, backward, weight) in enumerate(done):
                come = done[at - 1][0] if at else num_microbatches
                gone = done[at + 1][1] if at + 1 < num_stages else forward
                if backward < gone:
                    lists[at].append(Action(Pass.BACKWARD, backward))
                elif forward < come and forward - backward < num_stages:
                    lists[at].append(Action(Pass.FORWARD, forward))
                elif weight < backward:
                    lists[at].append(Action(WEIGHT, weight))
        return tuple(lists[stage])


@pytest.fixture
def zero_bubble(monkeypatch):
    monkeypatch.setitem(registry._SCHEDULES, Schedule.GPIPE, _ZeroBubble())
    simulator._order.cache_clear()
    yield Schedule.GPIPE
    simulator._order.cache_clear()


@pytest.mark.parametrize(("p", "m"), [*product(range(1, 5), (4, 8)), (4, 16)])
def test_weight_passes_fill_the_bubbles_as_the_closed_form_counts_them(zero_bubble, p, m):
    stage = StageTimes(1, 1, 0, 0, 0, further_ps={WEIGHT: 1})
    times = {Pass.FORWARD: 1, Pass.BACKWARD: 1, WEIGHT: 1}
    whole, fills = sum(times.values()), sum(kind.fill * time for kind, time in times.items())
    form = ClosedForm(fill=1, steady=m - 1, hidden=1)
    step = simulate([stage] * p, zero_bubble, m).step_ps
    assert step == 3 * m + p - 1 == form.time(p * fills, whole, 0, whole - fills)
    assert step == step_time_ps([stage] * p, zero_bubble, m) == lower_bound_ps([stage] * p, m)
    halves = ClosedForm(2, 2 * (m - 1), 2, 2, parts=2)
    assert halves.time(p * fills, whole, 0, whole - fills) == step


def test_a_weight_pass_is_an_event_that_sends_nothing(zero_bubble):
    events = simulate(
        [StageTimes(2, 3, 1, 0, 0, further_ps={WEIGHT: 5}), StageTimes(2, 3, 0, 0, 0, further_ps={WEIGHT: 4})],
        zero_bubble,
        1,
    )
    assert [tuple(e)[:2] + tuple(e)[4:] for e in events.events] == [
        (0, "forward", 0, 2),
        (0, "send_forward", 2, 3),
        (1, "forward", 3, 5),
        (1, "backward", 5, 8),
        (1, "send_backward", 8, 9),
        (1, "later", 8, 12),
        (0, "backward", 9, 12),
        (0, "later", 12, 17),
    ]
    assert events.step_ps == 17


def test_a_stage_holds_what_weight_passes_need_after_the_backward_pass(zero_bubble):
    moments = list(pass_counts(_ZeroBubble(), 4, 8, 0, 1))
    assert max(moment.in_flight[0] for moment in moments) == 3  # without the microbatch on its way
    assert max(moment.deferred[0] for moment in moments) == 4
    assert [moment.makes for moment in moments].count(True) == 1
    assert (moments[-1].in_flight, moments[-1].deferred, moments[-1].made) == ((0,), (0,), (True,))


def test_what_does_not_price_or_run_a_kind_of_pass_refuses_it_by_name(zero_bubble):
    with pytest.raises(ValueError, match="passes of kind later, for which a stage has no time"):
        simulate([StageTimes(1, 1, 0, 0, 0)], zero_bubble, 2)
    with pytest.raises(ValueError, match="no bound for schedules with passes of kind later"):
        _ = Configuration(8, 8, 2, zero_bubble).closed_forms
