"""What a plan may ask that this runtime cannot do yet: said before anything starts."""

from collections.abc import Iterator

from shardwright_formats.errors import BadInput
from shardwright_formats.plan import Attention, Plan, Schedule
from shardwright_formats.strategy import LayerStrategy, Recompute, SequenceParallel

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
    if plan.schedule is Schedule.INTERLEAVED_1F1B:
        yield "the schedule interleaved_1f1b", "use 1f1b or gpipe"
    if len({len(stage.ranks) for stage in plan.stages}) > 1:
        yield "a pipeline of stages of different width", "use equal ones"
    if plan.model.tied:
        yield "a model with tied embeddings", "set tie_word_embeddings to false"
    if "float16" in (precision.parameters, precision.compute, precision.reduce):
        yield "precision float16", "use bfloat16 or float32"
    if plan.attention is Attention.FLASH_ATTENTION_2:
        yield "attention flash_attention_2", "use auto, sdpa or eager"
    for name, strategy in (("embedding", plan.embedding), *_layers(plan), ("head", plan.head)):
        if strategy.sequence_parallel is SequenceParallel.ULYSSES:
            yield f"{name}: sequence_parallel ulysses", "use none or megatron"
    for name, layer in _layers(plan):
        if layer.recompute not in (Recompute.NONE, Recompute.FULL):
            yield f"{name}: recompute {layer.recompute}", "use none or full"


def _layers(plan: Plan) -> Iterator[tuple[str, LayerStrategy]]:
    return ((f"layers[{i}]", layer) for i, layer in enumerate(plan.layers))
