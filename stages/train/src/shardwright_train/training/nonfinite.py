"""The search for the origin of a loss or gradient that is not finite."""

import torch
from torch import Tensor, nn

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.torch_private import tree_leaves

# Forward finds come before those of the backward pass, then earlier microbatches, then lower layers, then ranks.
_Find = tuple[int, int, int, int, str]


def first_nonfinite(engine: Engine, step: Step, world: World) -> str:
    """Run a step again, watching every layer's output and gradients, and return where the first nonfinite value is.

    Collective over the world; the parameters are as they were, for such a step updates nothing.
    """
    finds: list[_Find] = []
    rank = world.rank
    hooks = []
    for layer in engine.stage.layers:
        calls = [0]

        def watch(
            _module: nn.Module, _args: object, output: object, name: str = layer.name, calls: list[int] = calls
        ) -> None:
            if not _finite(output):
                microbatch = calls[0]
                found = f"in the output of {name} on rank {rank}, microbatch {microbatch}"
                finds.append((0, microbatch, _position(name), rank, found))
            calls[0] += 1

        hooks.append(layer.module.register_forward_hook(watch))
    engine.forward_backward(step)
    for hook in hooks:
        hook.remove()
    for layer in engine.stage.layers:
        for name, parameter in layer.parallel.parameters.items():
            if not _finite(local_tensor(parameter.grad) if parameter.grad is not None else None):
                # The backward pass comes from the head: what it meets last is the lowest layer.
                found = f"in the gradient of {layer.name}'s {name} on rank {rank}"
                finds.append((1, 0, -_position(layer.name), rank, found))
            parameter.grad = None
    known = [find for of_rank in world.all_say(sorted(finds)[:1], list[_Find]) for find in of_rank]
    return f"first {min(known)[-1]}" if known else "and not again when the step was repeated"


def _finite(values: object) -> bool:
    # Detached, so that nothing is kept of it: a replay would otherwise go on to what selective recomputation left out.
    return all(bool(torch.isfinite(x.detach()).all()) for x in tree_leaves(values) if isinstance(x, Tensor))


def _position(layer: str) -> int:
    if layer == EMBEDDING:
        return -1
    return 1 << 30 if layer == HEAD else int(layer[len("layers[") : -1])
