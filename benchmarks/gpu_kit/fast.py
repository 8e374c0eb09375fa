"""S3: tokens per second of a Llama of 1.1 B parameters and of a model with experts: the runtime and plain loops.

Weights and optimizer are in float32, matrix products in bfloat16: in the runtime by the plan's precision, in the plain
loop by autocast, in a loop like torchtitan's by FSDP2. All clip by the global norm and step with fused AdamW. Times are
between CUDA events for which nothing waits until the last step is over.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_kit import compile_ahead as ahead
from gpu_kit.configurations import EXPERTS, LLAMA_1B
from gpu_kit.loops import SETTINGS, Way, plain_loop, runtime, sharded_loop, timed
from gpu_kit.rows import Row, Values, scaled, tried
from gpu_kit.setting import Setting
from gpu_kit.workbench import DrawnOnDevice, batch_of, described, engine_of, one_device_plan, step_of
from gpu_kit.worlds import lone_world
from harness import table
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from shardwright.devices.utilization import model_flops_utilization
from shardwright.types import EMBEDDING, HEAD, Plan
from shardwright_train.data.share import on_host
from shardwright_train.measurement.profiles import traced
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

_DENSE = LLAMA_1B | {"num_hidden_layers": 22}
_TINY_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
# 8 of 64 experts, in as many layers as fit into memory with float32 states.
_SPARSE = EXPERTS | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 10}
_TINY_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
_MICROBATCHES = (2, 8)
"""Numbers of microbatches; with the second, the host must not wait more often than with the first."""
TRACE = "trace.json.gz"


def dense_plan(setting: Setting, **fields: object) -> Plan:
    """Return the plan of the dense model on one device."""
    length, samples = setting.size((4096, 4), (16, 2))
    model = described(setting.size(_DENSE, _DENSE | _TINY_SIZES), "llama-1b", length)
    return one_device_plan(setting, model, "fast", samples, **({"attention": "sdpa"} | fields))


def _sparse_plan(setting: Setting, **fields: object) -> Plan:
    length, samples = setting.size((4096, 4), (16, 2))
    model = described(setting.size(_SPARSE, _SPARSE | _TINY_SIZES | _TINY_EXPERTS), "experts-64", length)
    return one_device_plan(setting, model, "fast", samples, **({"attention": "sdpa"} | fields))


_COMPILED: Mapping[str, Way] = {
    "runtime, compiled": lambda plan, *at: runtime(replace(plan, compile=True), *at),
    "transformers loop, compiled": partial(plain_loop, compiled=True),
    "FSDP2 loop, blocks compiled, loss in chunks": sharded_loop,
}
_WAYS: Mapping[str, tuple[str, Way]] = {
    "runtime": ("dense", runtime),
    "transformers loop": ("dense", plain_loop),
    "experts: runtime": ("experts", runtime),
    "experts: transformers, grouped products, weights in bfloat16": (
        "experts",
        partial(plain_loop, experts="grouped_mm"),
    ),
}


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows; compiled ways come last, so that nothing else is lost if compilation takes too long."""
    world, groups = lone_world(setting, stack), cache(lambda: Groups(setting.device_type))
    stack.enter_context(_compiled_fast(setting))
    plans = {"dense": cache(partial(dense_plan, setting)), "experts": cache(partial(_sparse_plan, setting))}

    def way(model: str, make: Way) -> Values:
        return _measured(setting, plans[model](), world(), groups(), make)

    def compiled(make: Way) -> Values:
        return way("dense", make) | {"compiled_ahead": ahead.wait(setting.size(60.0, 120.0))}

    def waits(model: str, microbatches: int) -> Values:
        samples = max(microbatches, plans[model]().global_batch_size)
        plan = replace(plans[model](), num_microbatches=microbatches, global_batch_size=samples)
        return counted(plan, world(), groups())

    return [
        *(Row(name, partial(way, model, make)) for name, (model, make) in _WAYS.items()),
        *(Row(f"waits: {m}, {n} microbatches", partial(waits, m, n)) for m in plans for n in _MICROBATCHES),
        Row("trace", lambda: _traced(setting, plans["dense"](), world(), groups())),
        *(Row(name, partial(compiled, make)) for name, make in _COMPILED.items()),
    ]


def compile_ahead(setting: Setting) -> None:
    """Run the first step of every compiled way; this is done in a separate process."""
    with ExitStack() as stack:
        stack.enter_context(_compiled_fast(setting))
        world, groups = lone_world(setting, stack)(), Groups(setting.device_type)
        plan = dense_plan(setting)
        batch = on_host(batch_of(plan.model, plan.global_batch_size, 0), world.device)
        for name, make in _COMPILED.items():
            row = Row(name, lambda make=make: {"loss": float(make(plan, world, groups)(batch))})  # type: ignore[misc]
            print(name, tried(row, setting, math.inf), flush=True)
            torch.compiler.reset()


@contextmanager
def _compiled_fast(setting: Setting) -> Iterator[None]:
    """In a rehearsal, compile without generating code for the processor, which would take minutes."""
    compiled = torch.compile

    def traced_alone(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return compiled(*arguments, **options | {"backend": "aot_eager"})

    with patch.object(torch, "compile", traced_alone if setting.tiny else compiled):
        yield


def _measured(setting: Setting, plan: Plan, world: World, groups: Groups, make: Way) -> Values:
    warm_up, steps = setting.size((3, 8), (1, 2))
    batches = [
        on_host(batch_of(plan.model, plan.global_batch_size, seed), world.device) for seed in range(warm_up + steps)
    ]
    found = timed(make(plan, world, groups), batches, warm_up, world.device)
    torch.compiler.reset()
    tokens = plan.global_batch_size * plan.model.sequence_length
    kinds, share = (EMBEDDING, *plan.model.layers, HEAD), model_flops_utilization(plan, found["step_s"])
    return {
        **found,
        "tokens_per_s": tokens / found["step_s"],
        "mfu": None if share is None else share.causal,
        "parameters": sum(prod(p.shape) for kind in kinds for p in plan.model.types[kind].parameters),
        "samples": plan.global_batch_size,
        "sequence_length": plan.model.sequence_length,
    }


def _traced(setting: Setting, plan: Plan, world: World, groups: Groups) -> Values:
    """Write PyTorch's trace of the runtime's fourth step."""
    engine = engine_of(plan, world, groups, "sdpa", SETTINGS)
    step = step_of(engine, batch_of(plan.model, plan.global_batch_size, 0))
    for _ in range(setting.size(3, 1)):
        engine.train_step(step)
    packed = setting.work / "out" / TRACE
    packed.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with traced(world.device, 0, packed) as hook:
        engine.train_step(step, hook=hook)
    return {"file": TRACE, "bytes": packed.stat().st_size}


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the tables of this step's report."""
    ways = {name: row for name, row in rows.items() if "tokens_per_s" in row}
    told = [
        [
            name,
            scaled(row["parameters"], 1e9),
            scaled(row["step_s"], 1e-3, ".1f"),
            f"{row['tokens_per_s']:,.0f}",
            scaled(row["mfu"], 0.01, ".1f"),
            scaled(row["peak_bytes"], 2**30),
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['start_up_s']:.1f}",
        ]
        for name, row in ways.items()
    ]
    shapes = {(row["samples"], row["sequence_length"]) for row in ways.values()}
    said = [f"Steps of {n} samples of {length} random tokens." for n, length in sorted(shapes)]
    columns = "way|B parameters|step, ms|tokens/s|MFU, %|peak, GiB|first loss|last loss|start-up, s"
    counts = "MFU counts the model's own operations, none on masked positions, nothing recomputed."
    return [*said, counts, "", *table(columns, told), "", *wait_lines(rows)]


# How often a step makes the host wait for the device, by PyTorch's profiler, for few and for many microbatches.
#
# If the host never waits during a step, the number is small and does not depend on the number of microbatches.


CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync")
"""Calls of CUDA. All except the last make the host wait; of the last, only copies to pageable host memory do."""
ASKED = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations whose result the host needs at once; on a processor only these are visible."""


def counted(plan: Plan, world: World, groups: Groups) -> Values:
    """Return the numbers of these calls in one step, after two other steps, and of those that wait."""
    engine = engine_of(plan, world, groups, "sdpa", weights=DrawnOnDevice())
    steps = [step_of(engine, batch_of(plan.model, plan.global_batch_size, seed), seed + 1) for seed in range(3)]
    for step in steps[:-1]:
        engine.train_step(step)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        engine.train_step(steps[-1])
    counts = Counter(event.name for event in profiler.events())
    waiting = CALLS[:-1] if world.device.type == "cuda" else ASKED
    return {"calls": {name: counts[name] for name in (*CALLS, *ASKED)}, "waits": sum(counts[n] for n in waiting)}


def wait_lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of waits."""
    names = (*CALLS, *ASKED)
    told = [
        [name.removeprefix("waits: "), row["waits"], *(row["calls"][each] for each in names)]
        for name, row in rows.items()
        if name.startswith("waits: ")
    ]
    said = "Waits of the host in one step; they must not grow with the microbatches."
    return [said, "", *table("|".join(["model", "waits", *(f"`{name}`" for name in names)]), told)]
