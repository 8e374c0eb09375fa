"""Runs inside the peer's own environment: hetu-galvatron's search of one case, or its price of given plans.

    python galvatron_search.py search CASE.json OUT.json
    python galvatron_search.py price CASE.json PLANS.json OUT.json

The search is the peer's own code, unchanged, from its argument parser to its C++ dynamic programme. What it imports but
does not use is replaced by empty modules, which makes its process faster: torch, and the `__init__` files of
`galvatron` and `galvatron.core` (CUDA kernels, Megatron, profilers). One name is patched: for T5, `num2str` makes
"512,512" from two equal lengths, and the next line reads that as one whole number.

A price is what the peer's search computes for a plan with its own cost-model classes. It is checked twice: against the
peer's own function for a step, and (in `benchmarks/search.py`) against what the search printed for its answer.
"""

import argparse
import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import galvatron_repairs as mends
import numpy as np


def _stub_what_the_search_does_not_use() -> None:
    site = next(Path(p) for p in sys.path if (Path(p) / "galvatron" / "core" / "search_engine").is_dir())
    for name, folder in (("galvatron", "galvatron"), ("galvatron.core", "galvatron/core")):
        package = types.ModuleType(name)
        package.__path__ = [str(site / folder)]
        sys.modules[name] = package
    names = ("torch", "torch.utils", "torch.utils.data", "torch.utils.data.distributed")
    sys.modules |= {name: types.ModuleType(name) for name in names}
    sys.modules["torch.utils.data"].DataLoader = None
    sys.modules["torch.utils.data.distributed"].DistributedSampler = None


_stub_what_the_search_does_not_use()

from galvatron.core.search_engine import search_engine as peer  # noqa: E402
from galvatron.core.search_engine.arguments import galvatron_search_args  # noqa: E402
from galvatron.core.search_engine.cost_model import (  # noqa: E402
    MemoryCostModel,
    OtherTimeCostModel,
    TimeCostModel,
    get_real_chunk,
    pipeline_costmodel,
)
from galvatron.core.search_engine.dynamic_programming import DpOnModel  # noqa: E402


def engine_of(case: dict[str, Any]) -> peer.GalvatronSearchEngine:
    """Return the peer's engine after it has read the profiles of a case."""
    options = {
        "num_nodes": case["nodes"],
        "num_gpus_per_node": case["devices_per_node"],
        "memory_constraint": case["memory_gib"],
        "settle_bsz": case["global_batch_size"],
        "max_tp_deg": case["max_tp_size"],
        "max_pp_deg": case["max_pp_size"],
        "disable_tp_consec": 1,
        "default_dp_type": "zero2",
        "pipeline_type": "pipedream_flush",
        "time_profile_mode": case["time_model"],
        "memory_profiling_path": case["folder"],
        "time_profiling_path": case["folder"],
        "allreduce_bandwidth_config_path": case["folder"],
        "p2p_bandwidth_config_path": case["folder"],
        "overlap_coe_path": case["folder"],
        "sp_time_path": case["folder"],
        "output_config_path": case["folder"],
        "log_dir": str(Path(case["folder"]) / "logs"),
    }
    line = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    line += ["--sequence_parallel"] if case["sequence_parallel"] == "megatron" else []
    args = galvatron_search_args(argparse.ArgumentParser()).parse_args(line)
    layers = case["layers"]
    args.hidden_size = layers[0]["hidden_size"]
    lengths = {layer["seq_len"] for layer in layers}
    if len(layers) > 1 and len(lengths) == 1:
        peer.num2str = lambda numbers, name: f"{name}{numbers[0]}"
    engine = peer.GalvatronSearchEngine(args)
    engine.set_search_engine_info(case["folder"], layers, case["name"])
    engine.initialize_search_engine()
    return engine


def strategies_of(config: dict[str, Any], devices: int) -> list[list[Any]]:
    """Return a config's layers in the form of the peer's search: [pp, tp, dp, {flags}]."""
    pp_size = config["pp_deg"]
    columns = [
        [int(text) for text in config[name].split(",")]
        for name in ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "checkpoint")
    ]
    found = []
    for tp_size, consecutive, zero3, recompute in zip(*columns, strict=True):
        dp_size = devices // pp_size // tp_size
        flags = {"tp": consecutive} if tp_size > 1 and dp_size > 1 else {}
        flags |= {"fsdp": zero3} if dp_size > 1 else {}
        found.append([pp_size, tp_size, dp_size, flags | ({"cpt": 1} if recompute else {})])
    return found


class Priced:
    """The peer's price of one plan in its own search space."""

    def __init__(self, engine: peer.GalvatronSearchEngine, config: dict[str, Any]) -> None:
        self.engine, self.config, self.devices = engine, config, engine.args.gpu_num
        self.pp_size, self.vocab_tp = config["pp_deg"], config["vtp"]
        self.strategies = strategies_of(config, self.devices)
        self.division = [int(text) for text in config["pp_division"].split(",")]
        tp_sizes = {s[1] for s in self.strategies} | {self.vocab_tp}
        self.min_tp, self.max_tp = min(tp_sizes), max(tp_sizes)
        width = self.devices // self.pp_size // self.min_tp
        self.batch, chunks = config["global_bsz"], config["chunks"]
        self.mbsz = (self.batch // width + chunks - 1) // chunks
        if self.batch % width or chunks != (self.batch // width + self.mbsz - 1) // self.mbsz:
            raise SystemExit(f"{chunks} microbatches of {self.batch} samples on {width} groups: not in its space")
        self.chunks = [
            peer.optimal_chunk_func_default(
                self.batch * self.min_tp // (self.devices // self.pp_size), [0, self.min_tp], self.mbsz, self.min_tp
            )
        ] * engine.num_layertype
        self.types = [i for i, count in enumerate(engine.layernum_list) for _ in range(count)]

    def lists(self, hardware: bool = True) -> dict[str, Any]:
        """Return the arguments that all of the peer's cost models take, by name, each a list by layer type."""
        engine = self.engine
        found = {
            "model_args": engine.model_args_list,
            "train_args": engine.train_args_list,
            "parallel_args": engine.parallel_args_list,
            "profile_model_args": engine.profile_model_args_list,
        }
        return found | ({"profile_hardware_args": engine.profile_hardware_args_list} if hardware else {})

    def vocabulary_s(self) -> tuple[list[float], list[float]]:
        """Return the seconds of embedding and head by pipeline stage, with gradient sync and without."""
        every, vsp, zero3 = {k: v[0] for k, v in self.lists().items()}, self.config["vsp"], self.config["embed_sdp"]
        cost = OtherTimeCostModel(
            self.mbsz,
            self.pp_size,
            self.devices,
            vsp,
            zero3,
            self.min_tp,
            self.max_tp,
            self.engine.seqlen_list,
            **every,
        )
        synced, unsynced = cost.gen_result()
        return synced[self.vocab_tp], unsynced[self.vocab_tp]

    def step_s(self, mended: frozenset[str] = frozenset()) -> float:
        """Return the seconds of a step; with nothing mended they must equal the result of the peer's own function."""
        groups = self.strategies[0][1] * self.strategies[0][2] // self.min_tp
        microbatches = get_real_chunk(int(self.batch / groups), self.chunks[0])
        model = mends.time_model(TimeCostModel, mended, self.engine.num_layertype)
        lists = self.lists()
        layers = [
            [
                model(
                    s, self.batch / microbatches, no_comm=no_comm, **{k: v[kind] for k, v in lists.items()}
                ).gen_result()
                for s, kind in zip(self.strategies, self.types, strict=True)
            ]
            for no_comm in (False, True)
        ]
        ends = np.cumsum([0, *self.division])
        stages = [[sum(row[a:b]) for a, b in pairwise(ends)] for row in layers]
        synced, unsynced = self.vocabulary_s()
        step_s = mends.pipeline_s(stages[0], stages[1], synced, unsynced, microbatches, mended)
        if not mended:
            self._check(step_s, unsynced)
        return step_s

    def _check(self, step_s: float, unsynced: list[float]) -> None:
        own = pipeline_costmodel(
            TimeCostModel, self.engine.layernum_list, *self.lists().values(), self.strategies, self.division,
            self.chunks, self.batch, self.min_tp, unsynced,
        )  # fmt: skip
        if abs(step_s - own) > 1e-9 * own:
            raise SystemExit(f"repeated as {step_s} s what the peer prices at {own} s")

    def memory_mib(self, mended: frozenset[str] = frozenset()) -> list[int]:
        """Return the MiB of a rank by pipeline stage, including its context and the all-gather buffer."""
        engine, lists = self.engine, self.lists(hardware=False)
        shape = {"mbsz": self.mbsz, "min_tp": self.min_tp, "max_tp": self.max_tp, "vsp": self.config["vsp"]}

        def cost(index: int, stage: int) -> dict[str, Any]:
            arguments = {k: v[self.types[index]] for k, v in lists.items()}
            return MemoryCostModel(
                self.strategies[index],
                self.batch,
                stage_idx=stage,
                embed_sdp=self.config["embed_sdp"],
                **shape,
                **arguments,
            ).get_memory_cost()

        vocabulary, buffer = cost(0, 0)["other"][self.vocab_tp], 0.0
        if engine.args.sequence_parallel:
            hidden, length = engine.args.hidden_size, max(engine.seqlen_list)
            buffer = self.mbsz / self.min_tp * self.max_tp * hidden * length * 2 / 2**20
        found, first = [], 0
        for stage, count in enumerate(self.division):
            indices = range(first, first + count)
            costs = [cost(i, stage) for i in indices]
            layers = sum(int(np.ceil(layer["enc_total"])) for layer in costs)
            if "replay" in mended:
                layers += int(max(self._replay_mib(i) for i in indices))
            if "late_gradients" in mended and self.config["chunks"] == 1:
                layers -= int(self._saved_mib(costs, indices))
            found.append(layers + int(np.ceil(vocabulary[stage])) + int(buffer))
            first += count
        return found

    def _saved_mib(self, costs: list[dict[str, Any]], indices: range) -> float:
        """Return the MiB saved with one microbatch: gradients are made as activations are freed; the peer adds both."""
        shards = [self.strategies[i][2] for i in indices]
        gradients = [layer["parameter"] / shard for layer, shard in zip(costs, shards, strict=True)]
        activations = [layer["activation"] for layer in costs]
        counts = range(len(costs))
        peak = max(sum(activations[: j + 1]) + sum(gradients[j:]) for j in counts)
        return sum(activations) + sum(gradients) - peak

    def _replay_mib(self, index: int) -> float:
        """Return the MiB of a recomputed layer during its backward pass, which the peer's memory model leaves out."""
        _, tp_size, _, flags = self.strategies[index]
        per_sample = self.engine.act_sizes[self.types[index]][tp_size]
        return per_sample * self.mbsz / self.min_tp * tp_size if flags.get("cpt") else 0.0

    def usable_mib(self) -> int:
        """Return the MiB that the peer's dynamic programme may fill."""
        every = self.engine.strategies
        model = DpOnModel(every, None, None, max_mem=self.engine.memory_constraint, gpu_num=self.devices)
        return int(model.max_mem)

    def report(self) -> dict[str, Any]:
        """Return all prices as JSON values; names of repairs are joined by spaces."""
        every = mends.DEFECTS + mends.DIFFERENCES
        mended = [*((name,) for name in every), mends.DEFECTS, mends.DIFFERENCES, every]
        return {
            "step_s": self.step_s(),
            "step_s_mended": {" ".join(names): self.step_s(frozenset(names)) for names in mended},
            "memory_mib": self.memory_mib(),
            "memory_mib_with_replay": self.memory_mib(frozenset({"replay"})),
            "memory_mib_late_gradients": self.memory_mib(frozenset({"late_gradients"})),
            "usable_mib": self.usable_mib(),
        }


def search(case: dict[str, Any]) -> dict[str, Any]:
    """Return the peer's best plan as its own config, with the time and memory that it predicts for it."""
    engine, folder = engine_of(case), Path(case["folder"])
    for old in folder.glob("galvatron_config_*.json"):
        old.unlink()
    found: dict[str, Any] = {}
    engine.save_results = lambda result, batch, chunk, division: found.update(
        result=result, none=peer.GalvatronSearchEngine.save_results(engine, result, batch, chunk, division)
    )
    if engine.parallelism_optimization() <= 0:
        return {"config": None}
    (path,) = folder.glob("galvatron_config_*.json")
    result = found["result"]
    believed = {"step_s": float(result["min_cost"]), "memory_mib": [int(m) for m in result["mem_cost"]]}
    return {"config": json.loads(path.read_text()), "believed": believed}


def main() -> None:
    """Search or price, and write JSON."""
    verb, case, *files = sys.argv[1:]
    read = json.loads(Path(case).read_text())
    if verb == "search":
        written = search(read)
    else:
        engine = engine_of(read)
        plans = json.loads(Path(files[0]).read_text())
        written = {name: Priced(engine, config).report() for name, config in plans.items()}
    Path(files[-1]).write_text(json.dumps(written, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
