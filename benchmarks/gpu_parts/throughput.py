"""Tokens per second of a Llama of 1 B parameters on one device: the runtime beside a plain loop over transformers.

Weights and optimizer in float32, matrix products in bfloat16: the runtime by the plan's precision, the plain loop by
autocast. Both clip by the global norm and step with fused AdamW; each also with torch.compile (the plain loop's whole
model). Times are between CUDA events that nothing waits for until the last step is over.
"""

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any

import torch
from gpu_parts.setting import Setting
from gpu_parts.workbench import (
    any_kernel,
    batch_of,
    described,
    engine_of,
    memory_given_back,
    one_device_plan,
    step_of,
    stock_of,
)
from msgspec.structs import replace
from torch import Tensor, nn

from shardwright_formats.types import EMBEDDING, HEAD, Plan
from shardwright_train.data.objectives import Batch
from shardwright_train.data.share import on_host
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.training.metrics import model_flops_utilization

# TinyLlama's sizes (Zhang et al. 2024), without its grouped heads' narrower keys.
FULL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
TINY = FULL | {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
SETTINGS = Hyperparameters(learning_rate=1e-4, warmup_steps=0, steps=10**6, weight_decay=0.1, clip_norm=1.0)

Train = Callable[[Batch], Tensor | float]
"""One step; its loss."""


def of_rank(setting: Setting, world: World) -> dict[str, Any]:
    """Every way, one after the other: each has the device alone."""
    length, samples, warm_up, steps = setting.size((2048, 8, 5, 20), (16, 2, 1, 2))
    model = described(setting.size(FULL, TINY), "llama-1b", length)
    plan = one_device_plan(setting, model, "throughput", samples, attention="sdpa")
    groups = Groups(setting.device_type)
    ways = {
        "runtime": lambda: _runtime(plan, world, groups),
        "runtime, compiled": lambda: _runtime(replace(plan, compile=True), world, groups),
        "plain loop": lambda: _plain(plan, world, groups),
        "plain loop, compiled": lambda: _plain(plan, world, groups, compiled=True),
    }
    batches = [on_host(batch_of(model, samples, seed), world.device) for seed in range(warm_up + steps)]
    rows = {}
    for name, make in ways.items():
        world.heartbeat.begin(f"in {name}")
        with memory_given_back(world.device):
            rows[name] = _timed(make(), batches, warm_up, world.device) | {"way": name}
            gc.collect()  # before the memory is given back: engines and compiled models hold cycles
    for row in rows.values():
        row["tokens_per_s"] = samples * length / row["step_s"]
        row["mfu"] = model_flops_utilization(plan, row["step_s"])
    kinds = (EMBEDDING, *model.layers, HEAD)
    parameters = sum(prod(p.shape) for kind in kinds for p in model.types[kind].parameters)
    shape = {"parameters": parameters, "samples": samples, "sequence_length": length, "steps": steps}
    return {"rows": list(rows.values()), **shape}


def _runtime(plan: Plan, world: World, groups: Groups) -> Train:
    engine = engine_of(plan, world, groups, "sdpa", SETTINGS)
    return lambda batch: engine.train_step(step_of(engine, batch, SETTINGS.steps // 2)).loss


def _plain(plan: Plan, world: World, groups: Groups, *, compiled: bool = False) -> Train:
    """What one would write by hand, with the weights that the runtime draws."""
    stock = stock_of(engine_of(plan, world, groups, "sdpa", SETTINGS), "sdpa")
    gc.collect()  # the engine
    named = dict(stock.named_parameters())
    decays = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    rate = SETTINGS.learning_rate_at(SETTINGS.steps // 2)
    adamw = torch.optim.AdamW(decays, lr=rate, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)
    model: Any = torch.compile(stock) if compiled else stock

    def step(batch: Batch) -> Tensor:
        tokens, labels = (batch[name].to(world.device, non_blocking=True) for name in ("tokens", "labels"))
        with any_kernel(), torch.autocast(world.device.type, dtype=torch.bfloat16):
            logits = model(tokens).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(stock.parameters(), SETTINGS.clip_norm)
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def _timed(train: Train, batches: list[Batch], warm_up: int, device: torch.device) -> dict[str, Any]:
    """The median step; the first loss, which all ways share but for rounding; what warming up took; peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    first = float(train(batches[0]))
    for batch in batches[1:warm_up]:
        train(batch)
    _wait(device)
    start_up_s = time.perf_counter() - started
    marks = [_mark(device)]
    for batch in batches[warm_up:]:
        train(batch)
        marks.append(_mark(device))
    _wait(device)
    times = [_between(a, b) for a, b in pairwise(marks)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s": median(times), "steps_s": times, "start_up_s": start_up_s, "loss": first, "peak_bytes": peak}


def _mark(device: torch.device) -> Any:  # noqa: ANN401
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:  # noqa: ANN401
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lines(result: dict[str, Any]) -> list[str]:
    """The table of the page."""
    head = [
        f"{result['parameters'] / 1e9:.2f} B parameters, {result['samples']} samples of {result['sequence_length']} "
        f"tokens a step, median of {result['steps']} steps. MFU counts the model's own operations, nothing recomputed.",
        "",
        "| | step | tokens/s | MFU | peak memory | first loss | start-up |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {row['way']} | {row['step_s'] * 1000:.1f} ms | {row['tokens_per_s']:,.0f} | {_told(row['mfu'], '.1%')} | "
        f"{_told(row['peak_bytes'] and row['peak_bytes'] / 2**30, '.2f GiB')} | {row['loss']:.4f} | "
        f"{row['start_up_s']:.1f} s |"
        for row in result["rows"]
    ]
    return [*head, *rows]


def _told(value: float | None, form: str) -> str:
    if value is None:
        return "not known"
    number, _, unit = form.partition(" ")
    return f"{value:{number}} {unit}".rstrip()
