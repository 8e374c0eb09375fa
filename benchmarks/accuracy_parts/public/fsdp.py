"""Runs of FSDP: torchtitan's Llama 3.1 8B on H100, and llm-foundry's MPT on A100."""

from pathlib import Path

from accuracy_parts.public.runs import GIB, Machine, Run, rows_of

from shardwright_formats.types import DataParallel, GradientReduction, Recompute, SequenceParallel

_LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
_H100 = Machine("H100-SXM", ((10_000, 3200.0),), memory_gbyte_s=2400.0, memory_bytes=96 * GIB)
"""Of HBM2e with a limit of 500 W, 400 Gbit/s each (Liang et al. 2024, TorchTitan, section 4)."""
_A100 = {
    "a100_40gb": Machine("A100-40", ((10_000, 1600.0),)),
    "a100_80gb": Machine("A100-80", ((10_000, 1600.0),)),
}
_RECOMPUTE = {"selective": Recompute.SELECTIVE, "full": Recompute.FULL, "none": Recompute.NONE}


def torchtitan(folder: Path) -> list[Run]:
    """The runs in bf16 without context parallelism, torch.compile and async TP, which no plan here can say."""
    columns = ("gpus", "tp", "pp", "cp", "local_batch", "activation_checkpointing", "precision", "torch_compile")
    found = []
    for row in rows_of(folder, columns):
        plain = row["precision"] == "bf16" and row["cp"] == "1" and row["async_tp"] == "0"
        if not plain or not row["gpu"].startswith("H100"):
            continue
        memory, compiled = row["peak_memory_gib"], row["torch_compile"] == "1"
        found.append(
            Run(
                set="torchtitan compiled" if compiled else "torchtitan",
                group=f"{row['gpus']} GPUs",
                name=f"8B on {row['gpus']} tp{row['tp']} mbs{row['local_batch']}",
                config=tuple((_LLAMA3_8B | {"max_position_embeddings": int(row["seq_len"])}).items()),
                sequence_length=int(row["seq_len"]),
                machine=_H100,
                devices=int(row["gpus"]),
                tp_size=int(row["tp"]),
                pp_size=int(row["pp"]),
                data_parallel=DataParallel.ZERO3,
                micro_batch_size=int(row["local_batch"]),
                num_microbatches=1,
                recompute=_RECOMPUTE[row["activation_checkpointing"].split()[-1]],
                runtime="torchtitan",
                sequence_parallel=SequenceParallel.MEGATRON,
                measured_s=float(row["step_time_s"]),
                measured_bytes=float(memory) * GIB if memory else None,
            )
        )
    return found


def llm_foundry(folder: Path) -> list[Run]:
    """The runs on up to 128 devices."""
    columns = ("model", "hidden", "heads", "ffn", "seq_len", "gpus", "gpu", "sharding", "micro_batch", "grad_acc")
    found = []
    for row in rows_of(folder, columns):
        if int(row["gpus"]) > 128 or row["activation_cpu_offload"] == "True":
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
                machine=_A100[row["gpu"]],
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
