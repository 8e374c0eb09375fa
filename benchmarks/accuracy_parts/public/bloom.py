"""BigScience's runs of 176B to 206B GPT with Megatron-DeepSpeed on A100 of 80 GB."""

from pathlib import Path

from accuracy_parts.public.runs import GIB, Machine, Run, rows_of

from shardwright.types import DataParallel, Recompute

_COLUMNS = ("layers", "hidden", "heads", "vocab", "seq_len", "zero_stage", "dp", "tp", "pp", "micro_batch", "optimizer")
_UNUSED = ("layers_not_given", "tflops_before_recount", "dp*tp*pp!=gpus", "sec_and_tflops_columns")
_MACHINE = Machine("A100-80", ((10_000, 400.0),), counts_process=True)
"""Jean Zay's nodes of 8: four Omni-Path links of 100 Gbit/s (the source's chronicles)."""


def bloom(folder: Path) -> list[Run]:
    """The runs whose layers are known and whose numbers are not marked as doubtful."""
    return [run for row in rows_of(folder, _COLUMNS) if (run := _run(row)) is not None]


def _run(row: dict[str, str]) -> Run | None:
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
        machine=_MACHINE,
        devices=dp_size * tp_size * pp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        data_parallel=DataParallel.ZERO2 if row["zero_stage"] == "1" else DataParallel.DDP,
        micro_batch_size=micro_batch_size,
        num_microbatches=batch // (micro_batch_size * dp_size),
        recompute=Recompute.FULL,
        runtime="megatron_deepspeed",
        # Gradients in fp16 alone (runtime/zero/stage_1_and_2.py); or bf16 and float32 ones (runtime/bf16_optimizer.py).
        reduce="bfloat16" if row["optimizer"].startswith("fp16") else "float32",
        measured_s=float(row["step_time_s"]),
        measured_bytes=float(memory) * GIB if memory else None,
    )
