"""Runs of FSDP: torchtitan's Llama 3.1 on H100, and llm-foundry's MPT on A100 and H100."""

from pathlib import Path

from accuracy_parts.public.runs import GIB, Machine, Run, known, rows_of

from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, GradientReduction, Recompute, SequenceParallel

_LLAMAS = {f"llama3.1-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}
"""Presets of the shapes, by torchtitan's names of models."""
_H100 = Machine("H100-SXM", ((10_000, 3200.0),), memory_gbyte_s=2400.0, memory_bytes=96 * GIB)
"""Of HBM2e with a limit of 500 W, 400 Gbit/s each (Liang et al. 2024, TorchTitan, section 4)."""
_MOSAIC = {
    "a100_40gb": Machine("A100-40", ((10_000, 1600.0),)),
    "a100_80gb": Machine("A100-80", ((10_000, 1600.0),)),
    "h100_80gb": Machine("H100-SXM", ((10_000, 3200.0),)),
}
"""The source states the network of A100 alone; 400 Gbit/s for each H100 are assumed, as on NVIDIA's own nodes."""
_RECOMPUTE = {"selective": Recompute.SELECTIVE, "full": Recompute.FULL, "none": Recompute.NONE}


def torchtitan(folder: Path) -> list[Run]:
    """The runs in bf16 on H100 without pipeline, context parallelism and async TP, which no uniform plan says."""
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
    """The runs in bf16 on up to 128 devices."""
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
                # Composer's ddp_sync_context (composer/distributed/dist_strategy.py) defers DistributedDataParallel's.
                gradient_reduction=GradientReduction.EVERY_MICROBATCH,
                measured_s=float(row["step_time_s"]),
            )
        )
    return found
