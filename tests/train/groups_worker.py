"""Run by forked_ranks: process groups of plans are made, used in a step and destroyed, and told of by their names."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from tiny_models import batch_of, engine_of

from shardwright.io import read_document
from shardwright.types import Plan, Plans
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step
from shardwright_train.torch_private import flight_recorder_trace


def main(plans_file: str, folder: str) -> None:
    """Take a step of every plan, and write of each what its groups did."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    plans = read_document(Path(plans_file), Plans).plans
    with joined_world("cpu") as world:
        found = [_of_plan(plan, world) for plan in plans]
        Path(folder, f"{world.rank}.json").write_text(json.dumps(found))


def _of_plan(plan: Plan, world: World) -> dict[str, Any]:
    before, groups, sent = _names(), Groups("cpu"), _recorded("send")
    with sent[0], (received := _recorded("recv"))[0]:
        engine = engine_of(plan, world, groups)
    made = [name for name in _names() if name not in before]
    warm = [name for name in _used() if name in made]
    engine.train_step(Step.of_batch(batch_of(plan.model, plan.global_batch_size, 0), engine.stage.context.share))
    used = [name for name in _used() if name in made]
    destroyed: list[str] = []
    destroy = dist.destroy_process_group

    def recorded(group: dist.ProcessGroup) -> None:
        destroyed.append(group.group_name)
        destroy(group)

    with patch.object(dist, "destroy_process_group", recorded):
        groups.close()
    messages = [group.group_name for _, calls in (sent, received) for group in calls]
    return {"made": made, "warm": warm, "messages": messages, "used": used, "destroyed": destroyed}


def _recorded(name: str) -> tuple[Any, list[dist.ProcessGroup]]:
    groups: list[dist.ProcessGroup] = []
    call = getattr(dist, name)

    def recorded(*args: Any, group: dist.ProcessGroup) -> Any:
        groups.append(group)
        return call(*args, group=group)

    return patch.object(dist, name, recorded), groups


def _names() -> list[str]:
    """Of this rank's groups, in the order in which they were made."""
    return [name for group, name in dist.distributed_c10d._world.pg_names.items() if group != dist.GroupMember.WORLD]


def _used() -> list[str]:
    """The groups of which the flight recorder has seen a collective, in the order of their first."""
    entries = json.loads(flight_recorder_trace("gloo"))["entries"]
    return list(dict.fromkeys(entry["process_group"][0] for entry in entries))


if __name__ == "__main__":
    main(*sys.argv[1:])
