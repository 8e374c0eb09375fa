"""A step whose sends block: what a pass sends and what the next one begins with go together, and both are waited for.

So do the launchers of others: Megatron-LM's `send_forward_recv_backward`, the fused sends and receives of torch's stock
schedules. A message goes when both sides are there; the order of the passes may then wait for ever.
"""

from collections.abc import Sequence
from typing import NamedTuple


class BlockingPass(NamedTuple):
    """A pass of a stage, and the messages that it begins and ends with; None where there is none."""

    pass_ps: int
    """Time until its message can go."""
    busy_ps: int
    """Time until its stage is free."""
    received: int | None
    """Number of the message."""
    sent: int | None
    send_ps: int


class Blocked(NamedTuple):
    """Times at which the passes of every stage start, each message is there, and each stage is free at last."""

    starts: list[list[int]]
    arrivals: dict[int, int]
    free: list[int]


def run_blocking_passes(stages: Sequence[Sequence[BlockingPass]]) -> Blocked:
    """Go through the passes of all stages.

    Raises ValueError where stages wait for one another.
    """
    starts: list[list[int]] = [[] for _ in stages]
    here = [0] * len(stages)
    free = [0] * len(stages)
    sent: dict[int, tuple[int, int]] = {}
    wanted: dict[int, int] = {exchanges[0].received: 0 for exchanges in stages if exchanges[0].received is not None}

    def there(message: int) -> int | None:
        """Return when a message has come, once both sides are there."""
        if message not in sent or message not in wanted:
            return None
        begun, send_ps = sent[message]
        return max(begun, wanted[message]) + send_ps

    going = True
    while going:
        going = False
        for stage, exchanges in enumerate(stages):
            while here[stage] < len(exchanges):
                done = exchanges[here[stage] - 1].sent if here[stage] else None
                needed = [there(message) for message in (done, exchanges[here[stage]].received) if message is not None]
                known = [time for time in needed if time is not None]
                if len(known) < len(needed):
                    break
                start = max([free[stage], *known])
                action = exchanges[here[stage]]
                starts[stage].append(start)
                free[stage] = start + action.busy_ps
                here[stage] += 1
                going = True
                if action.sent is not None:
                    sent[action.sent] = start + action.pass_ps, action.send_ps
                if here[stage] < len(exchanges) and (following := exchanges[here[stage]].received) is not None:
                    wanted[following] = start + action.pass_ps
    if any(at < len(exchanges) for at, exchanges in zip(here, stages, strict=True)):
        raise ValueError("with sends that block, pipeline stages of this schedule wait for one another")
    for stage, exchanges in enumerate(stages):
        if (last := exchanges[-1].sent) is not None:
            free[stage] = max(free[stage], there(last) or 0)
    return Blocked(starts, {message: there(message) or 0 for message in sent}, free)
