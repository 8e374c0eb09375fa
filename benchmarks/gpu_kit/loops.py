"""Training loops that are compared in speed: the runtime, and loops as one would write them by hand."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from gpu_kit.rows import Values
from gpu_kit.workbench import DrawnOnDevice, any_kernel, engine_of, step_of, stock_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from shardwright.types import Plan
from shardwright_train.data.objectives import Batch
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

SETTINGS = Hyperparameters(learning_rate=1e-4, warmup_steps=0, steps=10**6, weight_decay=0.1, clip_norm=1.0)
_RATE = SETTINGS.learning_rate_at(SETTINGS.steps // 2)
_CHUNKS = 8
"""Number of pieces of a batch's positions; the logits of only one piece exist at a time."""

Train = Callable[[Batch], Tensor | float]
"""A function that trains one step and returns its loss."""
Way = Callable[[Plan, World, Groups], Train]


def runtime(plan: Plan, world: World, groups: Groups) -> Train:
    """Return a function that trains a step with the runtime under a plan."""
    engine = engine_of(plan, world, groups, "sdpa", SETTINGS, DrawnOnDevice())
    return lambda batch: engine.train_step(step_of(engine, batch, SETTINGS.steps // 2)).loss


def plain_loop(plan: Plan, world: World, groups: Groups, *, compiled: bool = False, experts: str = "") -> Train:
    """Return a loop over stock transformers with the weights of the runtime.

    `experts`: how transformers computes experts. Autocast does not affect its grouped matrix products: with this option
    the weights are in bfloat16, and no autocast is used.
    """
    dtype = torch.bfloat16 if experts else torch.float32
    engine = engine_of(plan, world, groups, "sdpa", SETTINGS, DrawnOnDevice())
    stock = stock_of(engine, "sdpa", dtype, experts or "eager")
    del engine
    adamw = _adamw(stock)
    model: Any = torch.compile(stock) if compiled else stock

    def step(batch: Batch) -> Tensor:
        tokens, labels = _on_device(batch, world)
        with any_kernel(), torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=not experts):
            logits = model(tokens).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        return _updated(stock, adamw, loss)

    return step


def sharded_loop(plan: Plan, world: World, groups: Groups) -> Train:
    """Return a loop like torchtitan's: blocks compiled one by one and sharded by FSDP2, and the loss in chunks."""
    stock: Any = stock_of(engine_of(plan, world, groups, "sdpa", SETTINGS, DrawnOnDevice()), "sdpa")
    mesh = init_device_mesh(world.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in stock.model.layers:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(stock, mesh=mesh, mp_policy=policy)
    adamw = _adamw(stock)

    def chunk_loss(states: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.cross_entropy((states @ weight.T).float(), labels, reduction="sum")

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        states = stock.model(tokens).last_hidden_state.flatten(0, 1)
        pieces = zip(states.chunk(_CHUNKS), labels.flatten().chunk(_CHUNKS), strict=True)
        losses = [checkpoint(chunk_loss, x, y, stock.lm_head.weight, use_reentrant=False) for x, y in pieces]
        return torch.stack(losses).sum() / labels.numel()

    # FSDP2 gathers the head's weights when the whole model is called.
    stock.forward = forward

    def step(batch: Batch) -> Tensor:
        with any_kernel():
            loss: Tensor = stock(*_on_device(batch, world))
            loss.backward()
        return _updated(stock, adamw, loss)

    return step


def _on_device(batch: Batch, world: World) -> tuple[Tensor, Tensor]:
    tokens, labels = (batch[name].to(world.device, non_blocking=True) for name in ("tokens", "labels"))
    return tokens, labels


def _adamw(stock: nn.Module) -> torch.optim.AdamW:
    named = dict(stock.named_parameters())
    decays = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(decays, lr=_RATE, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)


def _updated(stock: nn.Module, adamw: torch.optim.AdamW, loss: Tensor) -> Tensor:
    nn.utils.clip_grad_norm_(stock.parameters(), SETTINGS.clip_norm)
    adamw.step()
    adamw.zero_grad()
    return loss.detach()


def timed(train: Train, batches: list[Batch], warm_up: int, device: torch.device) -> Values:
    """Return step times and their median, warm-up time, peak memory, and losses: equal for all ways up to rounding."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    losses = [train(batch) for batch in batches[:warm_up]]
    wait(device)
    start_up_s = time.perf_counter() - began
    marks = [mark(device)]
    for batch in batches[warm_up:]:
        losses.append(train(batch))
        marks.append(mark(device))
    wait(device)
    times = [between(a, b) for a, b in pairwise(marks)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "step_s": median(times),
        "steps_s": times,
        "start_up_s": start_up_s,
        "losses": [float(loss) for loss in losses],
        "peak_bytes": peak,
    }


def mark(device: torch.device) -> Any:  # noqa: ANN401
    """Return a mark of the present moment in the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(before: Any, after: Any) -> float:  # noqa: ANN401
    """Return the seconds between two marks; the device must have reached the second one."""
    seconds: float = after - before if isinstance(before, float) else before.elapsed_time(after) / 1000
    return seconds


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
