"""What every other system takes for granted of a plan's pipeline stages and microbatches, and how a plan is refused."""

from collections.abc import Iterator
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput
from shardwright_formats.semantics.canonical import effective
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import Attention, Plan, Schedule
from shardwright_formats.types.strategy import Strategy

__all__ = ["Exported", "Target", "check_stages", "elements", "kernel_notes", "layer_ranges"]


class Exported(NamedTuple):
    """What another system is told of a plan."""

    text: str
    """The file."""
    notes: tuple[str, ...]
    """What the file cannot hold and the user has to see to, a line each."""


class Target(NamedTuple):
    """Whom a plan is exported for, and the file it comes from: what a refusal names."""

    name: str
    plan_file: object

    def refusal(self, what: str, remedy: str) -> BadInput:
        """The error that says what the system cannot express."""
        return BadInput(self.plan_file, f"{self.name} cannot express {what}", remedy)


def elements(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    """Embedding, layers and head in order: the name and what its strategy does."""
    yield EMBEDDING, effective(plan.embedding)
    for i, layer in enumerate(plan.layers):
        yield f"layers[{i}]", effective(layer)
    yield HEAD, effective(plan.head)


def layer_ranges(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The layer ranges in the order of the layers: the first of every pipeline stage, then the second, and so on."""
    return tuple(stage.layers[chunk] for chunk in range(len(plan.stages[0].layers)) for stage in plan.stages)


def check_stages(plan: Plan, target: Target) -> None:
    """Raise BadInput unless the pipeline stages are equal blocks of ranks and the schedule is one of their number.

    Without a pipeline every system works through the microbatches one after the other: that is 1F1B, and not GPipe,
    which holds them all.
    """
    width = len(plan.stages[0].ranks)
    for i, stage in enumerate(plan.stages):
        if len(stage.ranks) != width:
            what = f"stages[{i}]: {len(stage.ranks)} ranks, stages[0] has {width}"
            raise target.refusal(what, "plan stages of equal width")
        if stage.ranks != tuple(range(i * width, (i + 1) * width)):
            raise target.refusal(
                f"stages[{i}]: its ranks are not {i * width} to {(i + 1) * width - 1}", "number by stage"
            )
    if len(plan.stages) == 1 and plan.num_microbatches > 1 and plan.schedule is Schedule.GPIPE:
        raise target.refusal("gpipe in a single pipeline stage", "choose the schedule 1f1b")


def kernel_notes(plan: Plan) -> Iterator[str]:
    """The kernels that a plan names: another system chooses its own, and nothing else depends on them."""
    if plan.attention is not Attention.AUTO:
        yield f"the attention kernel {plan.attention} is not in the file"
    if plan.fused:
        yield f"kernels that compute {', '.join(plan.fused)} are not in the file"
