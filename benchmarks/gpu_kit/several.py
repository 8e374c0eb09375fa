"""S8: what is most likely to hang or fail over NCCL: schedules, sends, ZeRO-3, tensor parallelism, Ulysses.

Every plan trains the same model with the same weights, so in float64 all must give the loss and the gradient norm of
plain data parallelism in each step, as on the processor. In bfloat16 they must finish with finite numbers.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from gpu_kit.configurations import configuration
from gpu_kit.loops import wait
from gpu_kit.rows import Row, Values, outcome
from gpu_kit.setting import Setting
from gpu_kit.steps import launch_ranks
from gpu_kit.workbench import MIXED, batch_of, described, engine_of, memory_given_back, plan_of, step_of
from harness import table
from msgspec.structs import replace

from shardwright.plan.chunks import placed
from shardwright.types.model import Model
from shardwright.types.plan import PipelineStage, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, SequenceParallel, Strategy
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

STEPS = 3
TOLERANCE = 1e-10
"""Maximum absolute difference in float64, as in `make parity`."""
FLOAT64 = Precision(parameters="float64", compute="float64", reduce="float64")
SETTINGS = Hyperparameters(learning_rate=1e-3, warmup_steps=0, steps=STEPS, weight_decay=0.1, clip_norm=1.0)
REFERENCE = "data parallel"


def plans_of(setting: Setting, model: Model, ranks: int, **fields: object) -> dict[str, Plan]:
    """Return the plans that are tried on some ranks, by name, all with the same global batch."""
    half, layers = ranks // 2, len(model.layers)
    fields |= {"global_batch_size": 15 * ranks}

    def whole(strategy: Strategy, name: str, microbatches: int = 1) -> Plan:
        return plan_of(setting, model, strategy, name=name, num_microbatches=microbatches, **fields)

    def piped(name: str, schedule: Schedule, chunks: int) -> Plan:
        cuts = [layers * i // (2 * chunks) for i in range(2 * chunks + 1)]
        held = placed(list(pairwise(cuts)), schedule, 2)
        stages = tuple(PipelineStage(ranks=tuple(range(i * half, (i + 1) * half)), layers=held[i]) for i in range(2))
        strategy = Strategy(tp_size=1, dp_size=half)
        return plan_of(setting, model, strategy, stages, name=name, num_microbatches=5, schedule=schedule, **fields)

    def sharded(name: str, kind: SequenceParallel) -> Plan:
        return whole(Strategy(tp_size=2, dp_size=half, sequence_parallel=kind), name)

    found = (
        whole(Strategy(tp_size=1, dp_size=ranks), REFERENCE),
        piped("interleaved 1F1B, 2 stages, 5 microbatches", Schedule.INTERLEAVED_1F1B, chunks=2),
        piped("1F1B, 2 stages, 5 microbatches", Schedule.ONE_F_ONE_B, chunks=1),
        piped("GPipe, 2 stages, 5 microbatches", Schedule.GPIPE, chunks=1),
        *(
            piped(f"split backward passes, {each}, 2 stages, 5 microbatches", each, chunks=2 if each.interleaves else 1)
            for each in Schedule
            if each.splits
        ),
        whole(Strategy(tp_size=1, dp_size=ranks, data_parallel=DataParallel.ZERO3), "ZeRO-3, 5 microbatches", 5),
        sharded("tensor parallel 2", SequenceParallel.NONE),
        sharded("tensor parallel 2, Megatron's sequence parallelism", SequenceParallel.MEGATRON),
        sharded("Ulysses 2", SequenceParallel.ULYSSES),
    )
    more = (_uneven(found[0]), _hsdp(whole)) if ranks >= 4 else ()
    return {plan.name: plan for plan in (*found, *more)}


def _uneven(plan: Plan) -> Plan:
    """Return a plan in which all ranks except the last hold the first half of the layers."""
    ranks, half = plan.world_size, len(plan.layers) // 2
    wide, narrow = {"dp_size": ranks - 1}, {"dp_size": 1}
    return replace(
        plan,
        name="1F1B, 2 stages of unequal width, 5 microbatches",
        num_microbatches=5,
        stages=(
            PipelineStage(ranks=tuple(range(ranks - 1)), layers=((0, half),)),
            PipelineStage(ranks=(ranks - 1,), layers=((half, len(plan.layers)),)),
        ),
        embedding=replace(plan.embedding, **wide),
        head=replace(plan.head, **narrow),
        layers=tuple(replace(layer, **(wide if i < half else narrow)) for i, layer in enumerate(plan.layers)),
    )


def _hsdp(whole: Callable[..., Plan]) -> Plan:
    strategy = Strategy(tp_size=1, dp_size=4, data_parallel=DataParallel.ZERO3, shard_size=2)
    return whole(strategy, "ZeRO-3 within pairs, replicated across them (HSDP)")


def ranks_of(setting: Setting) -> int:
    """Return 4 if there are at least 4 devices, else 2."""
    return 4 if setting.devices >= 4 else 2


def _plans(setting: Setting, ranks: int) -> dict[str, Plan]:
    """Return every plan in float64 and in bfloat16."""
    width, layers, vocabulary, length = setting.size((512, 8, 8192, 256), (32, 4, 61, 16))
    model = described(configuration("llama", width, layers, vocabulary, length), "several", length)
    # The fast attention kernels of processors and GPUs do not support float64.
    formats = {"float64": (FLOAT64, "eager"), "bfloat16": (MIXED, "sdpa")}
    found = {}
    for name, (precision, attention) in formats.items():
        for title, plan in plans_of(setting, model, ranks, precision=precision, attention=attention).items():
            found[f"{title}, {name}"] = plan
    return found


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return a row for each plan; all are measured in one launch."""
    launched = cache(lambda: launch_ranks(setting, "several", ranks_of(setting), setting.size(240, 600)))
    return [Row(name, partial(row_of, name, launched)) for name in _plans(setting, ranks_of(setting))]


def row_of(name: str, launched: Callable[[], dict[str, Values]]) -> Values:
    """Return a row of a launch; raise its error if it failed."""
    found = launched()[name]
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def of_rank(setting: Setting, world: World) -> dict[str, Values]:
    """Return the losses, norms and times of every plan on this rank."""
    plans = _plans(setting, world.size)
    references = {name: f"{REFERENCE}, {name.rpartition(', ')[2]}" for name in plans}
    return compared(setting, world, plans, references)


def compared(
    setting: Setting, world: World, plans: Mapping[str, Plan], references: Mapping[str, str]
) -> dict[str, Values]:
    """Return losses, norms and times of every plan, in float64 compared with those of its reference."""
    groups, found = Groups(setting.device_type), {}
    for name, plan in plans.items():
        # A plan that fails does so on all ranks.
        found[name] = outcome(partial(_trained, plan, world, groups))
    for name, row in found.items():
        wanted = found[references.get(name, REFERENCE)]
        if "error" in row or "error" in wanted:
            continue
        row["difference"] = max(abs(a - b) for a, b in zip(row["figures"], wanted["figures"], strict=True))
        finite = all(map(math.isfinite, row["figures"]))
        row["well"] = finite and (plans[name].precision != FLOAT64 or row["difference"] <= TOLERANCE)
    return found


def _trained(plan: Plan, world: World, groups: Groups) -> Values:
    world.heartbeat.begin(f"in {plan.name}")
    with memory_given_back(world.device):
        engine = engine_of(plan, world, groups, str(plan.attention), SETTINGS)
        figures: list[float] = []
        times = []
        for number in range(1, STEPS + 1):
            step = step_of(engine, batch_of(plan.model, plan.global_batch_size, seed=number), number)
            dist.barrier()
            started = time.perf_counter()
            outcome = engine.train_step(step)
            figures += [outcome.loss, outcome.grad_norm]
            wait(world.device)
            times.append(time.perf_counter() - started)
    return {"figures": figures, "last_step_s": times[-1]}


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of this step's report."""
    told = [
        [name, f"{row['difference']:.1e}", f"{row['last_step_s'] * 1000:.1f}", "yes" if row["well"] else "**no**"]
        for name, row in rows.items()
    ]
    said = f"In float64 losses and gradient norms must be those of plain data parallelism to {TOLERANCE:.0e}."
    return [f"{STEPS} steps. {said}", "", *table("plan|largest difference|last step, ms|well", told)]
