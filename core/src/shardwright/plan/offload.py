"""States in host memory: which plans may offload them, and their bytes."""

from collections.abc import Iterable
from math import prod

from shardwright.io import BadInput
from shardwright.optimizers.registry import OPTIMIZERS, Optimizer, Shard
from shardwright.plan.axes import layout_of
from shardwright.plan.chunks import chunk_layers
from shardwright.plan.layout import parameter_box
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import ITEMSIZE, LayerStrategy, Plan, Schedule

BUFFERS = 3
"""Number of device buffers for the states of one parameter: one is copied to the host, one is updated, one is
filled."""


def check_offload(plan: Plan, file: object) -> None:
    """Raise BadInput if a plan offloads what must stay on the device.

    These are states that the plan's optimizer needs on the device all at once, and activations under a schedule or
    compilation that does not support moving them.
    """
    offloads = next((i for i, layer in enumerate(plan.layers) if layer.offloads_optimizer), None)
    if offloads is not None and not can_offload(OPTIMIZERS[plan.optimizer]):
        problem = f"layers[{offloads}].offload: {plan.optimizer} updates whole matrices, of all layers at once"
        raise BadInput(file, problem, "leave out offload, or take another optimizer")
    if (moved := next((i for i, layer in enumerate(plan.layers) if layer.offloads_activations), None)) is None:
        return
    if plan.schedule.interleaves or plan.schedule.splits:
        problem = f"layers[{moved}].offload: activations are not in host memory under {plan.schedule}"
        raise BadInput(file, problem, f"choose schedule {Schedule.ONE_F_ONE_B} or {Schedule.GPIPE}")
    if plan.compile:
        problem = f"layers[{moved}].offload: activations of compiled layers are not in host memory"
        raise BadInput(file, problem, "choose compile false, or offload optimizer states alone")


def can_offload(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates one parameter after another, so that only a few states are on the device."""
    return not optimizer.whole_matrices


def copied_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of the device buffers, each of which can hold any parameter's states; `sizes`: their bytes."""
    return BUFFERS * max(sizes, default=0)


def host_inputs(plan: Plan, rank: int) -> int:
    """Return the most bytes of layers' inputs that a rank keeps in host memory at once.

    Recomputed layers keep nothing else; layers without recomputation keep more, which is not included.
    """
    stage = plan.stage_of_rank(rank)
    me = plan.stages[stage].ranks.index(rank)
    held = 0
    for chunk in range(len(plan.stages[stage].layers)):
        for name, _, strategy in chunk_layers(plan, stage, chunk):
            if not (isinstance(strategy, LayerStrategy) and strategy.offloads_activations):
                continue
            for tensor in plan.model.received_by(name):
                shard = layout_of(strategy).activation_shard(me, plan.microbatch_samples, tensor.sequence_length)
                held += shard.tokens * tensor.features * ITEMSIZE[plan.precision.compute]
    return held * schedule_of(plan.schedule).in_flight(len(plan.stages), plan.num_microbatches, stage)


def host_states(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the bytes in a rank's host memory by parameter: of states, and of the parameters that the host updates."""
    optimizer, stage = OPTIMIZERS[plan.optimizer], plan.stage_of_rank(rank)
    me, stored = plan.stages[stage].ranks.index(rank), plan.precision.parameters
    sizes = []
    for chunk in range(len(plan.stages[stage].layers)):
        for _, kind, strategy in chunk_layers(plan, stage, chunk):
            if not (isinstance(strategy, LayerStrategy) and strategy.offloads_optimizer):
                continue
            for parameter in plan.model.types[kind].trained_parameters:
                lengths = [high - low for low, high in parameter_box(parameter, strategy, me)]
                columns = lengths[-1] if len(lengths) > 1 else 0
                states = optimizer.held_bytes([Shard(prod(lengths), parameter.shape, columns)], stored)
                sizes.append(states + prod(lengths) * ITEMSIZE[stored] * strategy.updates_on_host)
    return tuple(sizes)
