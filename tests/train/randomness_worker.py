"""Run by the launcher on two ranks: what GPT-2 with dropout draws, written as JSON by rank 0."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from random_plans import random_plan
from tiny_models import batch_of, engine_of, tiny
from torch import Tensor, nn

from shardwright.types import (
    EMBEDDING,
    HEAD,
    RECOMPUTE_WHOLE,
    LayerStrategy,
    Model,
    Plan,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_train.data.share import Batch
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.rng import Randomness
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.runner import Step

RATE = 0.1
MODEL = tiny("gpt2", embd_pdrop=RATE, attn_pdrop=RATE, resid_pdrop=RATE)
PYRAMID = tiny("swin", drop_path_rate=0.9)
SAMPLES = 8
MICROBATCHES = 2
COPIES = {"tp_size": 2, "dp_size": 1}
SAMPLES_APART = {"tp_size": 1, "dp_size": 2}
POSITIONS_APART = COPIES | {"sequence_parallel": SequenceParallel.MEGATRON}
HEADS_APART = COPIES | {"sequence_parallel": SequenceParallel.ULYSSES}


def plan_of(strategies: list[dict[str, Any]], recompute: Recompute = Recompute.NONE, model: Model = MODEL) -> Plan:
    """A plan of one pipeline stage whose layers take turns in being spread by some strategies."""
    layers = [strategies[i % len(strategies)] for i in range(len(model.layers))]
    return msgspec.structs.replace(
        random_plan(model, 0, 2, "float32", stages=1),
        global_batch_size=SAMPLES,
        num_microbatches=MICROBATCHES,
        embedding=Strategy(**strategies[0]),
        head=Strategy(**strategies[0]),
        layers=tuple(
            LayerStrategy(type=kind, recompute=recompute, **layer)
            for kind, layer in zip(model.layers, layers, strict=True)
        ),
    )


@dataclass
class Seen:
    """What one step computed and drew on this rank."""

    outputs: list[Tensor] = field(default_factory=list)
    """Of the blocks, layer by layer in each microbatch."""
    residual: list[Tensor] = field(default_factory=list)
    """Which hidden states were kept, in the order in which they were."""
    attention: list[Tensor] = field(default_factory=list)
    """Which attention weights were kept."""
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Runner:
    world: World
    groups: Groups

    def run(self, plan: Plan, number: int = 1, kernel: str = "sdpa") -> Seen:
        """A step on samples that are the same in every microbatch and on every rank."""
        engine = engine_of(plan, self.world, self.groups, kernel)
        sample = batch_of(plan.model, 1, 0)
        batch: Batch = {name: x.expand(SAMPLES, *x.shape[1:]) for name, x in sample.items()}
        seen = Seen()
        for layer in engine.stage.layers:
            if layer.kind not in (EMBEDDING, HEAD):
                layer.module.register_forward_hook(lambda _module, _args, out: seen.outputs.append(out.detach()))
        with _drops_recorded(seen):
            loss = engine.forward_backward(Step.of_batch(batch, engine.stage.context.share, number=number))
        seen.gradients = [loss, *(local_tensor(p.grad) for p in engine.optimizer.parameters.values())]  # type: ignore[arg-type]
        return seen


@contextmanager
def _drops_recorded(seen: Seen) -> Iterator[None]:
    stock = nn.functional.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dropped = stock(x, p, training, inplace)
        (seen.attention if x.dim() == 4 else seen.residual).append(dropped.detach() != 0)
        return dropped

    with patch.object(nn.functional, "dropout", dropout):
        yield


def stale_seed_in_replays() -> AbstractContextManager[object]:
    """Replays, which run inside the backward pass, draw from another seed than the pass they replay."""
    stock = Randomness.seeded

    def seeded(self: Randomness, *seed: object) -> AbstractContextManager[None]:
        replayed = torch._C._current_graph_task_id() != -1
        return stock(self, *seed, "stale") if replayed else stock(self, *seed)

    return patch.object(Randomness, "seeded", seeded)


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether tensors are equal to the bit on every rank."""
    equal = len(some) == len(others) > 0 and all(map(torch.equal, some, others))
    flag = torch.tensor(int(equal))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def same_on_both_ranks(tensors: list[Tensor]) -> bool:
    mine = torch.cat([x.reshape(-1).double() for x in tensors])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return torch.equal(*both)


def findings(runner: Runner) -> dict[str, Any]:
    every = [COPIES, POSITIONS_APART, HEADS_APART, SAMPLES_APART]
    plain = runner.run(plan_of(every)).gradients
    recomputed = {r.value: plan_of(every, r) for r in RECOMPUTE_WHOLE if r is not Recompute.NONE}
    found: dict[str, Any] = {
        "repeated": same(plain, runner.run(plan_of(every)).gradients),
        "recomputed": {name: same(plain, runner.run(plan).gradients) for name, plan in recomputed.items()},
    }
    with stale_seed_in_replays():
        found["stale"] = {name: same(plain, runner.run(plan).gradients) for name, plan in recomputed.items()}
    copies, later = (runner.run(plan_of([COPIES]), number, "eager") for number in (1, 2))
    apart = {
        "samples": runner.run(plan_of([SAMPLES_APART])),
        "positions": runner.run(plan_of([POSITIONS_APART])),
        "heads": runner.run(plan_of([HEADS_APART])),
    }
    layers = len(MODEL.layers)
    kept = torch.cat([x.reshape(-1) for x in copies.residual]).float().mean().item()
    return found | {
        "kept": kept,
        "drops": len(copies.residual),
        "copies_equal": same_on_both_ranks(copies.outputs) and same_on_both_ranks(copies.residual),
        "copies_attend_alike": same_on_both_ranks(copies.attention),
        "microbatches_alike": same(copies.outputs[:layers], copies.outputs[layers:]),
        "layers_alike": torch.equal(copies.attention[0], copies.attention[1]),
        "samples_alike": torch.equal(*copies.residual[0][:2]),
        "steps_alike": same(copies.outputs, later.outputs),
        "ranks_alike": {name: same_on_both_ranks(seen.residual) for name, seen in apart.items()},
    }


def paths(runner: Runner) -> dict[str, Any]:
    """What leaves out whole parts of blocks, more of the later ones, for some samples."""
    both = [COPIES, SAMPLES_APART]
    plain = runner.run(plan_of(both, model=PYRAMID)).gradients
    copies = runner.run(plan_of([COPIES], model=PYRAMID))
    last = copies.outputs[-1]
    with stale_seed_in_replays():
        stale = runner.run(plan_of(both, Recompute.FULL, PYRAMID)).gradients
    return {
        "stale": same(plain, stale),
        "recomputed": {
            r.value: same(plain, runner.run(plan_of(both, r, PYRAMID)).gradients)
            for r in RECOMPUTE_WHOLE
            if r is not Recompute.NONE
        },
        "copies_equal": same_on_both_ranks(copies.outputs),
        # Samples are one and the same: they differ by what was left out.
        "samples_alike": torch.equal(last[0].expand_as(last), last),
        "steps_alike": same(copies.outputs, runner.run(plan_of([COPIES], model=PYRAMID), 2).outputs),
    }


def main(result_file: str) -> None:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with joined_world("cpu") as world:
        runner = Runner(world, Groups("cpu"))
        found = findings(runner) | {"paths": paths(runner)}
        if world.rank == 0:
            Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
