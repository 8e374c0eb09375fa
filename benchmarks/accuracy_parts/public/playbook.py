"""nanotron's Ultra-Scale Playbook: uniform plans of two Llama shapes on H100.

Its runs were started by nanotron's scripts/scaling_benchmarks.py, whose default tensor parallelism is REDUCE_SCATTER
(Megatron's sequence parallelism), and its layers were cut as models/base.py does, by the products of each block.
helpers.py (`log_throughput`) writes the memory of world rank 0.
"""

import csv
from itertools import accumulate
from pathlib import Path

from accuracy_parts.public.runs import GIB, Machine, Run, rows_of

from shardwright.types import DataParallel, Recompute, SequenceParallel
from shardwright.types.hardware_profile import Collective

_COLUMNS = ("model", "layers", "hidden", "gpus", "dp", "tp", "pp", "zero_stage", "micro_batch", "grad_acc", "status")
_COLLECTIVES = {
    "AllReduce": Collective.ALL_REDUCE,
    "AllGather": Collective.ALL_GATHER,
    "ReduceScatter": Collective.REDUCE_SCATTER,
}
"""Collectives by the source's names; others are priced at the rate of the first."""
_MAX_DEVICES = 128
"""Above, the source's own repeats and bandwidths differ several times over."""


def playbook(folder: Path) -> list[Run]:
    """Every run of the sets' global batch on up to 128 devices."""
    node_gbit_s = {name: _node_gbit_s(folder, name) for name in _COLLECTIVES}
    others = tuple((_COLLECTIVES[name], rates) for name, rates in node_gbit_s.items() if name != "AllReduce")
    machine = Machine("H100-SXM", node_gbit_s["AllReduce"], others, measured=True)
    return [
        _run(row, machine)
        for row in rows_of(folder, _COLUMNS)
        if int(row["gpus"]) <= _MAX_DEVICES and row["global_batch"] == "256" and not row["flags"]
    ]


def _run(row: dict[str, str], machine: Machine) -> Run:
    number = {name: int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")}
    tp_size, pp_size, ok = int(row["tp"]), int(row["pp"]), row["status"] == "ok"
    config = {
        "model_type": "llama",
        "hidden_size": number["hidden"],
        "intermediate_size": number["ffn"],
        "num_hidden_layers": number["layers"],
        "num_attention_heads": number["heads"],
        "num_key_value_heads": number["kv_heads"],
        "vocab_size": number["vocab"],
        "max_position_embeddings": number["seq_len"],
        "tie_word_embeddings": row["tied_embeddings"] == "1",
    }
    return Run(
        set=f"playbook {row['model']}",
        group=f"{row['gpus']} GPUs",
        name=f"{row['model']} dp{row['dp']} tp{tp_size} pp{pp_size} zero{row['zero_stage']} mbs{row['micro_batch']}",
        config=tuple(config.items()),
        sequence_length=number["seq_len"],
        machine=machine,
        devices=int(row["gpus"]),
        tp_size=tp_size,
        pp_size=pp_size,
        data_parallel=DataParallel.ZERO2 if row["zero_stage"] == "1" else DataParallel.DDP,
        micro_batch_size=int(row["micro_batch"]),
        num_microbatches=int(row["grad_acc"]),
        recompute=Recompute.NONE,
        runtime="nanotron",
        sequence_parallel=SequenceParallel.MEGATRON,
        cuts=_cuts(number, pp_size),
        measured_s=float(row["step_time_s"]) if ok else None,
        measured_bytes=float(row["peak_memory_gb"]) * GIB if ok else None,
        read_on_first=True,
        failed=not ok,
    )


def _cuts(number: dict[str, int], pp_size: int) -> tuple[int, ...]:
    """A block goes to the next stage once what came before it exceeds the stage's even share of all products."""
    hidden, layers = number["hidden"], number["layers"]
    layer, head = 4 * hidden * hidden + 3 * number["ffn"] * hidden, number["vocab"] * hidden
    total, found = layers * layer + head, [0]
    for count, done in enumerate(accumulate([layer] * layers), start=1):
        if len(found) < pp_size and done > total * len(found) / pp_size:
            found.append(count)
    return (*found, *[layers] * (pp_size + 1 - len(found)))


def _node_gbit_s(folder: Path, collective: str) -> tuple[tuple[int, float], ...]:
    """A collective's measured rate by nodes: bytes that each ring sends over its time, all rings of a node."""
    with (folder / "collectives.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["collective"] == collective and row["nodes"] != "1"]
    return tuple((int(row["nodes"]), 8 * float(row["bandwidth_gb_s"])) for row in rows)
