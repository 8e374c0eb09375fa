"""nanotron's Ultra-Scale Playbook: uniform plans of two Llama shapes on H100.

Its runs were started by nanotron's scripts/scaling_benchmarks.py, whose default tensor parallelism is REDUCE_SCATTER
(Megatron's sequence parallelism), and its layers were cut as models/base.py does, by the products of each block.
helpers.py (`log_throughput`) writes the memory of world rank 0.
"""

from itertools import accumulate
from pathlib import Path

import numpy as np
from accuracy_parts.public.runs import GIB, Machine, Run, rows_of

from shardwright.devices.table import read_devices
from shardwright.estimate.hardware import START_S, moved_bytes, steps
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
_EVERYWHERE = 10_000
"""Nodes of groups that one rate is meant for."""


def playbook(folder: Path) -> list[Run]:
    """Every run of the sets' global batch on up to 128 devices."""
    machine = _machine(folder)
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


def _machine(folder: Path) -> Machine:
    """The cluster, by its own times of collectives: one latency of a step between nodes, and a rate of each.

    They are the least squares of the relative errors over as many nodes as the runs have. A rate by the number of
    nodes, which these times give as well, holds the steps of a ring of all GPUs; tensor or data parallelism has
    shorter rings. `step_us` and the rates of nodes are those of `message_times_s`, and the steps inside a node too.
    """
    columns = ("collective", "nodes", "gpus", "message_mb", "bandwidth_gb_s")
    rows = [row for row in rows_of(folder, columns, "collectives.csv") if 1 < int(row["nodes"]) <= _MAX_DEVICES // 8]
    names = tuple(_COLLECTIVES)
    inside_s = read_devices().devices["H100-SXM"].link_step_s
    design, times_s = np.zeros((len(rows), 1 + len(names))), np.zeros(len(rows))
    for i, row in enumerate(rows):
        collective, size, nodes = _COLLECTIVES[row["collective"]], int(row["gpus"]), int(row["nodes"])
        moved = moved_bytes(collective, size, 1e6 * float(row["message_mb"]))
        crossing = steps(collective, nodes)
        design[i, 0], design[i, 1 + names.index(row["collective"])] = crossing, moved
        known_s = START_S + (steps(collective, size) - crossing) * inside_s
        times_s[i] = moved / (1e9 * float(row["bandwidth_gb_s"])) - known_s
    step_s, *seconds_a_byte = np.linalg.lstsq(design / times_s[:, None], np.ones(len(rows)), rcond=None)[0].tolist()
    rates = {name: ((_EVERYWHERE, 8e-9 / each),) for name, each in zip(names, seconds_a_byte, strict=True)}
    others = tuple((_COLLECTIVES[name], rates[name]) for name in names[1:])
    return Machine("H100-SXM", rates[names[0]], others, measured=True, step_us=1e6 * step_s)
