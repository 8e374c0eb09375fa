"""What a plan may ask that this runtime cannot do yet: said before anything starts."""

from collections.abc import Iterator

from shardwright_formats.errors import BadInput
from shardwright_formats.plan import Attention, Plan

__all__ = ["attention_kernel", "check_supported"]


def check_supported(plan: Plan, file: object) -> None:
    """Raise BadInput naming the first thing in a plan that cannot be run."""
    for what, remedy in _beyond(plan):
        raise BadInput(file, f"{what} is not run by this version", remedy)


def attention_kernel(plan: Plan) -> str:
    """The kernel that runs: `auto` takes PyTorch's scaled_dot_product_attention."""
    return Attention.SDPA.value if plan.attention is Attention.AUTO else plan.attention.value


def _beyond(plan: Plan) -> Iterator[tuple[str, str]]:
    precision = plan.precision
    if len({len(stage.ranks) for stage in plan.stages}) > 1:
        yield "a pipeline of stages of different width", "use equal ones"
    if "float16" in (precision.parameters, precision.compute, precision.reduce):
        yield "precision float16", "use bfloat16 or float32"
    if plan.attention is Attention.FLASH_ATTENTION_2:
        yield "attention flash_attention_2", "use auto, sdpa or eager"
