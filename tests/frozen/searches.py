"""What the frozen cases search, and in which worlds."""

from pathlib import Path
from typing import Any

from given import document

__all__ = ["SEARCHES", "WORLDS", "write_searches"]

_PRECISIONS = {
    "mixed": {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"},
    "half": {"parameters": "float32", "compute": "float16", "reduce": "float32"},
    "full": {"parameters": "float32", "compute": "float32", "reduce": "float32"},
}
WORLDS = {
    "llama": ("a100-1x8", "llama-7b", "a100-1x8", "llama-7b@a100", "mixed"),
    "llama-mended": ("a100-1x8", "llama-7b", "a100-1x8", "llama-7b-mended@a100", "mixed"),
    "vit": ("a100-1x8", "vit-huge", "a100-1x8", "vit-huge@a100", "mixed"),
    "swin": ("a100-1x8", "swin", "a100-1x8", "swin@a100", "mixed"),
    "gpt2": ("a100-2x4", "gpt2-xl", "a100-2x4", "gpt2-xl@a100", "half"),
    "bert": ("a100-2x4", "bert-large", "a100-2x4", "bert-large@a100", "half"),
    "t5": ("a10-2x4", "t5-3b", "a10-2x4", "t5-3b@a10", "half"),
    **{
        f"{name}-dgx": ("dgx-2x8", model, "dgx-2x8", f"{model}@dgx", "mixed")
        for name, model in (("llama", "llama-7b"), ("gpt2", "gpt2-xl"), ("bert", "bert-large"), ("t5", "t5-3b"),
                            ("vit", "vit-huge"))
    },
    "toy": ("toy-1x4", "tiny", "toy-1x4", "tiny", "full"),
    "toys": ("toy-2x4", "tiny", "toy-2x4", "tiny", "full"),
    "toy-long": ("toy-1x4", "tiny@384", "toy-1x4", "tiny", "full"),
    "toy-analytic": ("toy-1x4", "tiny", "toy-1x4-analytic", "tiny-analytic", "full"),
    "toy-fit": ("toy-1x4", "tiny", "toy-1x4", "tiny-fit", "full"),
}  # fmt: skip
"""Cluster, model, hardware profile, model profile and number formats of the searches."""

_B16 = {"global_batch_size": 16}
_TOY = {**_B16, "num_microbatches": [1, 2, 4, 8]}
_TIGHT = {**_TOY, "memory_gib": 0.05}
_KINDS = {"sequence_parallel": ["none", "megatron", "ulysses"], "recompute": ["none", "full", "attention", "mlp"]}
_NONE = {"sequence_parallel": ["none"]}
_ZERO3 = {"tp_sizes": [1], "data_parallel": ["zero3"]}
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    # families, with profiles of others
    "llama": ("llama", {"global_batch_size": 64, "sequence_parallel": ["megatron"]}),
    "llama-tight": ("llama", {"global_batch_size": 32, "memory_gib": 24, "sequence_parallel": ["megatron"]}),
    "llama-infeasible": ("llama", {"global_batch_size": 8, "memory_gib": 4, "sequence_parallel": ["megatron"]}),
    "llama-mended": (
        "llama-mended",
        {"global_batch_size": 16, "memory_gib": 36, "tp_sizes": [1, 2], "max_pp_size": 4, **_NONE},
    ),
    "vit": ("vit", {"global_batch_size": 64, "memory_gib": 12}),
    "swin": ("swin", {"global_batch_size": 64, "memory_gib": 8, "sequence_parallel": ["none"]}),
    "swin-tight": ("swin", {"global_batch_size": 64, "memory_gib": 5, "sequence_parallel": ["none"], "pp_sizes": [2]}),
    "gpt2": ("gpt2", {"global_batch_size": 32, "max_tp_size": 4, **_NONE}),
    "gpt2-gpipe": (
        "gpt2",
        {"global_batch_size": 32, "schedules": ["gpipe"], "pp_sizes": [4], "tp_sizes": [1, 2], **_NONE},
    ),
    "bert": ("bert", {"global_batch_size": 32, "space": "3d", "max_tp_size": 4, **_NONE}),
    "t5": ("t5", {"global_batch_size": 32, "objective": "step_time", "max_dp_size": 4, "max_tp_size": 4, **_NONE}),
    # families, with analytic profiles
    "llama-dgx": (
        "llama-dgx",
        {"global_batch_size": 64, "memory_gib": 40, "num_microbatches": [4, 8, 16], "max_tp_size": 8},
    ),
    "gpt2-dgx": ("gpt2-dgx", {"global_batch_size": 64, "memory_gib": 8, "reserve_gib": 0.5, "max_tp_size": 8}),
    "bert-dgx": (
        "bert-dgx",
        {"global_batch_size": {"min": 64, "max": 128, "step": 32}, "memory_gib": {"n": 4}, "max_tp_size": 8},
    ),
    "t5-dgx": ("t5-dgx", {"global_batch_size": 32, "memory_gib": 9, "pp_sizes": [1, 2, 4], "max_tp_size": 8}),
    "vit-dgx": (
        "vit-dgx",
        {"global_batch_size": 128, "memory_gib": 6, "disable": ["sequence_parallel"], "max_tp_size": 8},
    ),
    # a small model, with profiles as if measured
    "roomy": ("toy", _TOY),
    "tight": ("toy", _TIGHT),
    "tightest": ("toy", _TIGHT | {"memory_gib": 0.03125, **_KINDS}),
    "infeasible": ("toy", _TOY | {"memory_gib": 0.015625}),
    "infeasible-interleaved": (
        "toy",
        _TOY | {"memory_gib": 0.015625, "schedules": ["interleaved_1f1b"], "pp_sizes": [2]},
    ),
    "infeasible-nodes": ("toys", _TOY | {"memory_gib": 0.015625, "pp_sizes": [1], "tp_sizes": [1]}),
    "gpipe": ("toy", _TIGHT | {"schedules": ["gpipe"], "pp_sizes": [2, 4]}),
    "interleaved": ("toy", _TOY | {"schedules": ["interleaved_1f1b"], "chunks_per_stage": [2, 4], "pp_sizes": [2]}),
    "interleaved-tight": ("toy", _TIGHT | {"schedules": ["interleaved_1f1b"], "pp_sizes": [2, 4]}),
    "schedules": (
        "toys",
        _TIGHT | {"schedules": ["1f1b", "gpipe", "interleaved_1f1b"], "max_tp_size": 4, "memory_gib": 0.042},
    ),
    "batches": ("toy", {"global_batch_size": {"min": 4, "max": 16, "step": 4}, "memory_gib": 0.045}),
    "price": ("toy", {"global_batch_size": {"min": 8, "max": 16, "step": 8}, "objective": "usd_per_sample"}),
    "step-time": ("toys", _TIGHT | {"objective": "step_time", "reserve_gib": 0.01, "max_tp_size": 4}),
    "coarse": ("toy", _TIGHT | {"fine_grained": False}),
    "kinds": ("toy", _TIGHT | _KINDS | {"memory_gib": 0.043, "max_pp_size": 2}),
    "strided": ("toy", _TOY | {"tp_consecutive": [True, False], "tp_sizes": [2], "max_pp_size": 2}),
    "strided-refused": ("toys", _TOY | {"tp_consecutive": [True, False], "tp_sizes": [2], "max_pp_size": 2}),
    "outer": (
        "toy",
        _TOY | {"embedding": {"tp_sizes": [1]}, "head": {"tp_sizes": [4], "sequence_parallel": ["megatron"]}},
    ),
    "every-microbatch": ("toy", _TIGHT | {"gradient_reduction": "every_microbatch", "max_pp_size": 2}),
    "gather-buffer": (
        "toy",
        _TIGHT | {"megatron_gather_buffer": True, "sequence_parallel": ["megatron"], "tp_sizes": [2]},
    ),
    "degrees": ("toy", _TOY | {"pp_sizes": [2], "tp_sizes": [2], "num_microbatches": [4]}),
    "static": ("toy", _TIGHT | {"time_model": "static"}),
    "batch": ("toy", _TIGHT | {"time_model": "batch"}),
    "sequence": ("toy-long", _TOY | {"time_model": "sequence", "memory_gib": 0.11}),
    "sequence-lacking": ("toy-long", _TOY),
    "analytic": ("toy-analytic", _TIGHT | {"memory_gib": 1.943}),
    "fit": ("toy-fit", _TOY | {"tp_sizes": [1, 2], "memory_gib": 0.5}),
    "fit-lacking": ("toy-fit", _TOY | {"sequence_parallel": ["ulysses"]}),
    "disabled": ("toy", _TIGHT | {"disable": ["zero", "recompute"], "memory_gib": 0.08}),
    "ties": ("toy", _TOY | _ZERO3 | {"pp_sizes": [4], "recompute": ["none"]}),
    "recompute": (
        "toy",
        _TIGHT
        | _NONE
        | {
            "recompute": ["none", "attention", "mlp"],
            "data_parallel": ["zero2"],
            "num_microbatches": [2],
            "pp_sizes": [1],
        },
    ),
    "ulysses": ("toy", _TIGHT | {"sequence_parallel": ["ulysses"], "tp_sizes": [2, 4], "pp_sizes": [1, 2]}),
    "space-tp": ("toy", _TOY | {"space": "tp"}),
    **{
        f"space-{space}": ("toys", _TOY | {"space": space, "max_tp_size": 4, "memory_gib": 0.046875})
        for space in ("dp", "zero", "pp", "dp+tp", "dp+pp", "3d")
    },
    "strided-nodes": ("toys", _TOY | {"tp_consecutive": [False], "tp_sizes": [4], "pp_sizes": [1]}),
    "contradiction": ("toy", _TOY | {"space": "dp", "pp_sizes": [2]}),
    "misspelt": ("toy", _TOY | {"memory_gb": 3}),
}


def write_searches(folder: Path) -> None:
    """Write all search files."""
    (folder / "searches").mkdir()
    for name, (world, asked) in SEARCHES.items():
        content = {"name": name, "precision": _PRECISIONS[WORLDS[world][-1]], **asked}
        (folder / f"searches/{name}.json").write_text(document("shardwright.search", content))
