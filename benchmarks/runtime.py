"""A step of the runtime beside plain PyTorch on the same work: two processes, the same Llama, the same data, in turns.

    python benchmarks/runtime.py [--pairs 15] [--out FILE.json]

DDP is held against `DistributedDataParallel`, ZeRO-3 against a hand-written `fully_shard` loop over the stock
transformers model, each with clipping by the global norm and fused AdamW, both as they are and with every layer
compiled. Both live in the same processes and take turns, step by step, so that what else the machine does meets both;
the ratio is the median of the pairs' ratios. The losses of every pair are compared: it is the same work.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from shardwright.launch.ranks import launch
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.plan import PipelineStage, Plan, Schedule
from shardwright.types.strategy import DataParallel, LayerStrategy, Strategy
from shardwright_train.engine.engine import build_engine
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.models.base import family_named
from shardwright_train.models.description import describe
from shardwright_train.models.initial_weights import fill
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, joined_world
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step

RANKS, BATCH, LENGTH, WARM_UP = 2, 8, 128, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
SETTINGS = Hyperparameters(learning_rate=1e-4, warmup_steps=0, steps=10**6, weight_decay=0.1, clip_norm=1.0)


def the_plan(kind: DataParallel, compiled: bool) -> Plan:
    """One pipeline stage, data parallel alone."""
    spread = {"tp_size": 1, "dp_size": RANKS, "data_parallel": kind}
    model = describe(family_named("llama", "benchmark"), CONFIG, "benchmark", LENGTH)
    node = NodeType(device="cpu", devices_per_node=RANKS, memory_bytes=1 << 34)
    return Plan(
        name=kind.value,
        model=model,
        cluster=Cluster(name="here", nodes=(NodeGroup(node_type="cpu", count=1),), node_types={"cpu": node}),
        global_batch_size=BATCH,
        num_microbatches=1,
        compile=compiled,
        schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=tuple(range(RANKS)), layers=((0, len(model.layers)),)),),
        embedding=Strategy(**spread),
        head=Strategy(**spread),
        layers=tuple(LayerStrategy(type="block", **spread) for _ in model.layers),
    )


class Ours:
    """The runtime, as `run` and `measure` call it."""

    def __init__(self, plan: Plan, world: World, groups: Groups) -> None:
        context = RankContext(
            plan=plan,
            family=family_named("llama", "benchmark"),
            rank=world.rank,
            groups=groups,
            attention="sdpa",
            device=world.device,
            seed=0,
        )
        self.engine = build_engine(context, SETTINGS)

    def step(self, text: Tensor) -> float:
        """One step on tokens [batch, length + 1]; returns the mean loss over all ranks."""
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
        return self.engine.train_step(
            Step.of_batch(batch, self.engine.stage.context.share, number=SETTINGS.steps // 2)
        ).loss


class Plain:
    """What one would write by hand."""

    def __init__(self, plan: Plan, world: World, kind: DataParallel) -> None:
        self.rank = world.rank
        stock = _with_the_same_weights(plan)
        for layer in stock.model.layers if plan.compile else ():
            layer.compile()
        if kind is DataParallel.DDP:
            self.model: nn.Module = DistributedDataParallel(stock)
        else:
            for layer in stock.model.layers:
                fully_shard(layer, reshard_after_forward=True)
            self.model = fully_shard(stock)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": SETTINGS.weight_decay},
            {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        rate = SETTINGS.learning_rate_at(SETTINGS.steps // 2)
        self.adamw = torch.optim.AdamW(groups, lr=rate, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)

    def step(self, text: Tensor) -> float:
        """As `Ours.step`."""
        mine = text.chunk(RANKS)[self.rank]
        logits = self.model(mine[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS.clip_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / RANKS


def _with_the_same_weights(plan: Plan) -> LlamaForCausalLM:
    family = family_named("llama", "benchmark")
    config = family.configuration(plan.model)
    config._attn_implementation = "sdpa"
    stock = LlamaForCausalLM(config)
    state = {}
    for element in ("embedding", *(f"layers[{i}]" for i in range(len(plan.layers))), "head"):
        for local, fillings in family.fillings(plan.model, element).items():
            name = family.full_name(plan.model, element, local)
            state[name] = torch.empty(stock.get_parameter(name).shape)
            whole = [(0, length) for length in state[name].shape]
            fill(state[name], fillings, state[name].shape, whole, 0, name)
    stock.load_state_dict(state, strict=True)
    return stock


def _timed(runner: Ours | Plain, text: Tensor) -> tuple[float, float]:
    dist.barrier()
    started = time.perf_counter()
    loss = runner.step(text)
    dist.barrier()
    return time.perf_counter() - started, loss


def worker(result: str, pairs: int) -> None:
    """One rank: measures both, in turns, for each kind."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    found = {}
    with joined_world("cpu") as world:
        groups = Groups("cpu")
        for kind, compiled in product((DataParallel.DDP, DataParallel.ZERO3), (False, True)):
            plan, name = the_plan(kind, compiled), f"{kind}{' compiled' * compiled}"
            ours, plain = Ours(plan, world, groups), Plain(plan, world, kind)
            generator = torch.Generator().manual_seed(0)
            times: list[tuple[float, float]] = []
            for number in range(WARM_UP + pairs):
                text = torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
                order = (ours, plain) if number % 2 else (plain, ours)
                measured = {runner: _timed(runner, text) for runner in order}
                difference = abs(measured[ours][1] - measured[plain][1])
                if difference > 1e-3:
                    raise SystemExit(f"{name}: the losses differ by {difference}: it is not the same work")
                if number >= WARM_UP:
                    times.append((measured[ours][0], measured[plain][0]))
            found[name] = times
            if world.rank == 0:
                print(f"{name}: {_summary(times)}", flush=True)
        if world.rank == 0:
            Path(result).write_text(json.dumps(found))


def _summary(times: list[tuple[float, float]]) -> str:
    ours, plain = medians(times)
    return f"ours {ours * 1000:.0f} ms, plain {plain * 1000:.0f} ms, {ratio(times)}"


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """The median of either side of the pairs, in seconds."""
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second)


def ratio(times: list[tuple[float, float]]) -> str:
    """The pairs' ratios, in words."""
    ratios = sorted(a / b for a, b in times)
    quarter = len(ratios) // 4
    middle = f"middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, {len(ratios)} pairs"
    return f"ratio {statistics.median(ratios):.3f} ({middle})"


def compare(file: str, doc: str | None, work: Callable[[str, int], None], pairs: int) -> None:
    """The command of a benchmark: start ranks of its file that measure pairs, and keep the times that they wrote."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs, help="timed pairs of each")
    parser.add_argument("--out", type=Path, help="JSON of all times in seconds, for each pair")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.pairs)
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "times.json"
        command = [sys.executable, file, "--worker", str(result), "--pairs", str(options.pairs)]
        launch(command, range(RANKS), RANKS)
        if options.out:
            head = {"device": "cpu", "torch": str(torch.__version__), "date": datetime.now(UTC).date().isoformat()}
            options.out.write_text(json.dumps(head | {"seconds": json.loads(result.read_bytes())}, indent=1) + "\n")


if __name__ == "__main__":
    compare(__file__, __doc__, worker, 15)
