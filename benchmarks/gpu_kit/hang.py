"""A hang that is made: rank 1 sleeps where the others enter a collective, and the launcher says which."""

import re
import time
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from gpu_kit.configurations import configuration
from gpu_kit.rows import Values
from gpu_kit.setting import Setting
from gpu_kit.several import REFERENCE, plans_of
from gpu_kit.steps import rank_command
from gpu_kit.workbench import described

from shardwright.io import RunFailed
from shardwright.launch.collectives import collectives_of
from shardwright.launch.ranks import launch
from shardwright.plan.process_groups import Purpose
from shardwright.types import Plan
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.torch_private import flight_recorder_trace

RANKS = 2
HANG_S = 5.0
SAID = r"rank 1 has not entered all_reduce \d+ of data parallelism of ranks 0 1, in which rank 0 waits"


def made(setting: Setting) -> Values:
    """Start the ranks and hold what the launcher says of them to what was made."""
    folder = setting.work / "hang"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job"
    job.write_bytes(msgspec.json.encode(setting, enc_hook=str))
    command = rank_command("hang", job, folder / "none")
    try:
        launch(command, range(RANKS), RANKS, hang_timeout_s=HANG_S, log_folder=folder)
    except RunFailed as error:
        said = str(error)
    else:
        raise RunFailed("the ranks ended, though one of them sleeps")
    traces = [folder / f"rank-{rank}-collectives.json" for rank in range(RANKS)]
    entered = [len(collectives_of(trace.read_bytes()).groups) for trace in traces if trace.exists()]
    if re.search(SAID, said) is None:
        raise RunFailed(f"the collective that rank 1 has not entered is not named: {said}")
    return {"said": said, "groups": entered}


def of_rank(setting: Setting, world: World) -> Values:
    """Hang."""
    world.heartbeat.answer(partial(flight_recorder_trace, world.backend))
    plan, groups = _plan(setting), Groups(setting.device_type)
    groups.prepare(plan)
    world.heartbeat.begin("in a hang that is made")
    if world.rank == 1:
        time.sleep(10 * HANG_S)
    group = groups.among(Purpose.DATA_PARALLEL, range(RANKS))
    dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(10 * HANG_S)
    return {}


def _plan(setting: Setting) -> Plan:
    model = described(configuration("llama", 32, 4, 61, 16), "hang", 16)
    return plans_of(setting, model, RANKS)[REFERENCE]
