"""Published runs of FSDP, Megatron-DeepSpeed and nanotron, row by row; `nvidia.py` has the runs of Megatron-Core."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from accuracy_parts.public.runs import GIB, Machine, Run, known, rows_of

from shardwright.devices.table import read_devices
from shardwright.estimate.hardware import START_S, moved_bytes, steps
from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, GradientReduction, Recompute, SequenceParallel
from shardwright.types.hardware_profile import Collective

# Runs of FSDP: torchtitan's Llama 3.1 on H100, and llm-foundry's MPT on A100 and H100.


_LLAMAS = {f"llama3.1-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}
"""Presets with the shapes of torchtitan's models, by their names."""
_H100 = Machine("H100-SXM", ((10_000, 3200.0),), memory_gbyte_s=2400.0, memory_bytes=96 * GIB)
"""H100 with HBM2e, a limit of 500 W and 400 Gbit/s each (Liang et al. 2024, TorchTitan, section 4)."""
_MOSAIC = {
    "a100_40gb": Machine("A100-40", ((10_000, 1600.0),)),
    "a100_80gb": Machine("A100-80", ((10_000, 1600.0),)),
    "h100_80gb": Machine("H100-SXM", ((10_000, 3200.0),)),
}
"""The source states only the network of A100; 400 Gbit/s for each H100 are assumed, as on NVIDIA's own nodes."""
_RECOMPUTE = {"selective": Recompute.SELECTIVE, "full": Recompute.FULL, "none": Recompute.NONE}


def torchtitan(folder: Path) -> list[Run]:
    """Return the runs in bf16 on H100 that a uniform plan can express: no pipeline, context parallelism or async TP."""
    columns = ("model", "gpu", "gpus", "tp", "pp", "cp", "local_batch", "activation_checkpointing")
    columns += ("precision", "torch_compile", "async_tp", "seq_len", "step_time_s", "peak_memory_gib")
    presets, found = read_presets(), []
    for row in rows_of(folder, columns):
        shapes = presets[_LLAMAS[known(folder, row, "model", _LLAMAS)]].config
        plain = row["precision"] == "bf16" and row["cp"] == row["pp"] == "1" and row["async_tp"] == "0"
        if not plain or not row["gpu"].startswith("H100"):
            continue
        memory, compiled, size = row["peak_memory_gib"], row["torch_compile"] == "1", row["model"].rpartition("-")[2]
        found.append(
            Run(
                set=f"torchtitan {size.upper()}{' compiled' * compiled}",
                group=f"{row['gpus']} GPUs",
                name=f"{size.upper()} on {row['gpus']} tp{row['tp']} mbs{row['local_batch']}",
                config=tuple((shapes | {"max_position_embeddings": int(row["seq_len"])}).items()),
                sequence_length=int(row["seq_len"]),
                machine=_H100,
                devices=int(row["gpus"]),
                tp_size=int(row["tp"]),
                pp_size=1,
                data_parallel=DataParallel.ZERO3,
                micro_batch_size=int(row["local_batch"]),
                num_microbatches=1,
                recompute=_RECOMPUTE[row["activation_checkpointing"].split()[-1]],
                runtime="torchtitan",
                sequence_parallel=SequenceParallel.MEGATRON,
                compiled=compiled,
                measured_s=float(row["step_time_s"]),
                measured_bytes=float(memory) * GIB if memory else None,
            )
        )
    return found


def llm_foundry(folder: Path) -> list[Run]:
    """Return the runs in bf16 on up to 128 devices, without offloaded activations."""
    columns = ("model", "hidden", "heads", "ffn", "seq_len", "gpus", "gpu", "precision", "sharding")
    columns += ("micro_batch", "grad_acc", "activation_checkpointing", "activation_cpu_offload", "step_time_s")
    found = []
    for row in rows_of(folder, columns):
        machine = _MOSAIC[known(folder, row, "gpu", _MOSAIC)]
        offloads, in_bf16 = row["activation_cpu_offload"] == "True", row["precision"].endswith("bf16")
        if int(row["gpus"]) > 128 or offloads or not in_bf16:
            continue
        hidden, length = int(row["hidden"]), int(row["seq_len"])
        config = {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": int(row["layers"]),
            "n_head": int(row["heads"]),
            "n_inner": int(row["ffn"]),
            "vocab_size": int(row["vocab"]),
            "n_positions": length,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
        found.append(
            Run(
                set="llm_foundry",
                group=f"{row['model']} at {length} on {row['gpus']} {row['gpu']}",
                name=f"{row['model']} at {length} on {row['gpus']} {row['gpu']} mbs{row['micro_batch']}",
                config=tuple(config.items()),
                sequence_length=length,
                machine=machine,
                devices=int(row["gpus"]),
                tp_size=1,
                pp_size=1,
                data_parallel=DataParallel.ZERO3 if row["sharding"] == "FULL_SHARD" else DataParallel.ZERO2,
                micro_batch_size=int(row["micro_batch"]),
                num_microbatches=int(row["grad_acc"]),
                recompute=Recompute.FULL if row["activation_checkpointing"] == "True" else Recompute.NONE,
                runtime="llm_foundry",
                # ddp_sync_context (composer/distributed/dist_strategy.py) defers only DistributedDataParallel's.
                gradient_reduction=GradientReduction.EVERY_MICROBATCH,
                measured_s=float(row["step_time_s"]),
            )
        )
    return found


# BigScience's runs of 176B to 206B GPT with Megatron-DeepSpeed on A100 of 80 GB.


_BLOOM_COLUMNS = (
    "layers",
    "hidden",
    "heads",
    "vocab",
    "seq_len",
    "zero_stage",
    "dp",
    "tp",
    "pp",
    "micro_batch",
    "optimizer",
)
_UNUSED = ("layers_not_given", "tflops_before_recount", "dp*tp*pp!=gpus", "sec_and_tflops_columns")
_JEAN_ZAY = Machine("A100-80", ((10_000, 400.0),), counts_process=True)
"""Jean Zay's nodes of 8 GPUs: four Omni-Path links of 100 Gbit/s (according to the source's chronicles)."""


def bloom(folder: Path) -> list[Run]:
    """Return the runs whose layers are known and whose numbers are not marked as doubtful."""
    return [run for row in rows_of(folder, _BLOOM_COLUMNS) if (run := _bloom_run(row)) is not None]


def _bloom_run(row: dict[str, str]) -> Run | None:
    if not (row["layers"] and row["dp"] and row["status"] == "ok") or any(flag in row["flags"] for flag in _UNUSED):
        return None
    layers, hidden, heads = int(row["layers"]), int(row["hidden"]), int(row["heads"])
    dp_size, tp_size, pp_size = int(row["dp"]), int(row["tp"]), int(row["pp"])
    micro_batch_size, batch = int(row["micro_batch"]), int(row["global_batch"])
    if pp_size == 1 or layers < 12 or hidden % heads or batch % (micro_batch_size * dp_size):
        return None
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": int(row["vocab"]),
        "n_positions": int(row["seq_len"]),
    }
    memory = row["peak_memory_gb"]
    return Run(
        set="bloom",
        group=f"{layers} layers of {hidden}, {heads} heads, batch {batch}, {dp_size * tp_size * pp_size} GPUs",
        name=f"line {row['line']}: {layers} x {hidden} dp{dp_size} tp{tp_size} pp{pp_size} mbs{micro_batch_size}",
        config=tuple(config.items()),
        sequence_length=int(row["seq_len"]),
        machine=_JEAN_ZAY,
        devices=dp_size * tp_size * pp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        data_parallel=DataParallel.ZERO2 if row["zero_stage"] == "1" else DataParallel.DDP,
        micro_batch_size=micro_batch_size,
        num_microbatches=batch // (micro_batch_size * dp_size),
        recompute=Recompute.FULL,
        runtime="megatron_deepspeed",
        # Gradients only in fp16 (runtime/zero/stage_1_and_2.py), or in bf16 and float32 (runtime/bf16_optimizer.py).
        reduce="bfloat16" if row["optimizer"].startswith("fp16") else "float32",
        measured_s=float(row["step_time_s"]),
        measured_bytes=float(memory) * GIB if memory else None,
    )


# nanotron's Ultra-Scale Playbook: uniform plans of two Llama shapes on H100.
#
# Its runs were started by nanotron's scripts/scaling_benchmarks.py, whose default tensor parallelism is REDUCE_SCATTER
# (Megatron's sequence parallelism). Its layers are cut into stages as in models/base.py, by the matrix products of each
# block. helpers.py (`log_throughput`) writes the memory of world rank 0.


_PLAYBOOK_COLUMNS = (
    "model",
    "layers",
    "hidden",
    "gpus",
    "dp",
    "tp",
    "pp",
    "zero_stage",
    "micro_batch",
    "grad_acc",
    "status",
)
_COLLECTIVES = {
    "AllReduce": Collective.ALL_REDUCE,
    "AllGather": Collective.ALL_GATHER,
    "ReduceScatter": Collective.REDUCE_SCATTER,
}
"""Collectives by the source's names; other collectives are priced at the rate of the first."""
_MAX_DEVICES = 128
"""Maximum number of devices: above it the source's own repeats and bandwidths differ by several times."""
_EVERYWHERE = 10_000
"""Number of nodes up to which a rate applies: more than any group spans."""


def playbook(folder: Path) -> list[Run]:
    """Return every run with the usual global batch on up to 128 devices whose numbers are not marked as doubtful."""
    machine = _machine(folder)
    return [
        _run(row, machine)
        for row in rows_of(folder, _PLAYBOOK_COLUMNS)
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
    """Return the bounds of the stages: a stage ends as soon as the matrix products so far exceed its even share."""
    hidden, layers = number["hidden"], number["layers"]
    layer, head = 4 * hidden * hidden + 3 * number["ffn"] * hidden, number["vocab"] * hidden
    total, found = layers * layer + head, [0]
    for count, done in enumerate(accumulate([layer] * layers), start=1):
        if len(found) < pp_size and done > total * len(found) / pp_size:
            found.append(count)
    return (*found, *[layers] * (pp_size + 1 - len(found)))


def _machine(folder: Path) -> Machine:
    """Return the cluster with one latency of a step between nodes and a rate of each collective, from measured times.

    They minimize the squared relative errors of the source's times of collectives, over as many nodes as the runs have.
    Rates by the number of nodes could also be taken from these times, but would include the steps of a ring of all
    GPUs, and the rings of tensor or data parallelism are shorter. `step_us`, the rates and the steps inside a node have
    the meaning that they have in `message_times_s`.
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
