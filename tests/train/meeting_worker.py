"""Run by forked_ranks, two ranks: steps in which the first message of a group makes both its ranks wait for the other.

So NCCL does, which makes a communicator of two ranks at their first message.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.types import Plans
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import joined_world
from shardwright_train.pipeline.runner import Step


@contextmanager
def meeting(folder: Path, timeout_s: float) -> Iterator[None]:
    """Inside, ranks meet at the first message of a group, or raise when the other does not come."""
    store, met = dist.FileStore(str(folder / "store"), dist.get_world_size()), set[str]()

    def patched(name: str) -> Any:
        call: Callable[..., Any] = getattr(dist, name)

        def after_meeting(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            if group.group_name not in met:
                met.add(group.group_name)
                store.set(f"{group.group_name} {dist.get_rank()}", "")
                others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
                store.wait([f"{group.group_name} {rank}" for rank in others], timedelta(seconds=timeout_s))
            return call(*args, group=group, **kwargs)

        return patch.object(dist, name, after_meeting)

    with patched("isend"), patched("irecv"), patched("send"), patched("recv"):
        yield


def main(plans_file: str, folder: str) -> None:
    """Run a step of every plan, and of the last one again with groups that no message has gone over."""
    plans = read_document(Path(plans_file), Plans).plans
    losses: dict[str, float] = {}
    with joined_world("cpu") as world:
        for plan in plans:
            with meeting(Path(folder), 60):
                losses[plan.name] = _loss(plan, world)
        if world.rank == 1:
            Path(folder, "losses.json").write_text(json.dumps(losses))
        with meeting(Path(folder), 2), patch.object(Groups, "_warm_up"):
            try:
                _loss(plan, world)
                said = "over"
            except RuntimeError as error:
                said = str(error)
        Path(folder, f"{world.rank}.said").write_text(said)
        os._exit(0)  # gloo does not let go of receives that nothing has come for: so the other rank ends, too


def _loss(plan: Any, world: Any) -> float:
    engine = engine_of(plan, world, Groups("cpu"))
    batch = batch_of(plan.model, plan.global_batch_size, 0)
    return engine.forward_backward(Step.of_batch(batch, engine.stage.context.share)).item()


if __name__ == "__main__":
    main(*sys.argv[1:])
