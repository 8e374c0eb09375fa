"""What the frozen cases are given: documents, tables in Galvatron's grammar, profiles as if measured.

Where a format gets another version or another key, it is changed here, in one place.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

__all__ = ["CLUSTERS", "LLAMA_TIMES", "SETTINGS", "as_measured", "measurement_of", "write_given"]

HERE = Path(__file__).parent / "committed"
VERSIONS = {"shardwright.cluster": 1, "shardwright.profile_settings": 1, "shardwright.search": 1}
"""Of the documents that are made here."""
REWRITTEN: tuple[tuple[str, str, str], ...] = ()
"""Regular expression, replacement and reason, for the committed model descriptions: what of their spelling changed."""


def document(name: str, content: Mapping[str, Any]) -> str:
    """A document of one of our formats."""
    return json.dumps({"format": name, "version": VERSIONS[name], **content}, indent=1) + "\n"


def _cluster(device: str, nodes: int, devices: int, gib: float, usd: float | None) -> dict[str, Any]:
    kind = {"device": device, "devices_per_node": devices, "memory_bytes": int(gib * 2**30), "usd_per_hour": usd}
    return {"nodes": [{"node_type": "n", "count": nodes}], "node_types": {"n": kind}}


CLUSTERS = {
    "a100-1x8": _cluster("A100", 1, 8, 40, 32.77),
    "a100-2x4": _cluster("A100", 2, 4, 40, 16.5),
    "a10-2x4": _cluster("A10", 2, 4, 24, 5.67),
    "dgx-2x8": _cluster("NVIDIA A100-SXM4-80GB", 2, 8, 80, 40.97),
    "toy-1x4": _cluster("toy", 1, 4, 4, 3.6),
    "toy-2x4": _cluster("toy", 2, 4, 4, None),
}
_MIXED = {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"}
SETTINGS = {
    "large": {
        "tp_sizes": [1, 2, 4, 8],
        "sequence_parallel": ["none", "megatron"],
        "recompute": ["none", "full"],
        "micro_batch_sizes": [1, 2, 4, 8],
        "precision": _MIXED,
    },
    "toy": {
        "tp_sizes": [1, 2, 4],
        "sequence_parallel": ["none", "megatron", "ulysses"],
        "recompute": ["none", "full", "attention", "mlp"],
        "micro_batch_sizes": [1, 2, 4, 8, 16],
    },
    "probes": {
        "tp_sizes": [1, 2],
        "sequence_parallel": ["none", "megatron"],
        "recompute": ["none", "full"],
        "micro_batch_sizes": [1, 4],
    },
}

_LEVELS = (3136, 784, 196, 49)


def _of_layers(lengths: tuple[int, ...], counts: Iterator[tuple[int, ...]], batches: tuple[int, ...],
               layer_ms: tuple[float, ...], rest_ms: tuple[float, float]) -> dict[str, float]:  # fmt: skip
    """Times of whole models: layers take (1/16 + batch) times their figure, the rest a constant and a slope."""
    spelled = f"seq[{','.join(map(str, lengths))}]" if len(lengths) > 1 else f"seq{lengths[0]}"
    return {
        f"layernum[{','.join(map(str, count))}]_bsz{batch}_{spelled}": rest_ms[0]
        + rest_ms[1] * batch
        + sum(n * each * (batch + 0.0625) for n, each in zip(count, layer_ms, strict=True))
        for count in counts
        for batch in batches
    }


def _one_more_of_each(kinds: int) -> Iterator[tuple[int, ...]]:
    yield (2,) * kinds
    for kind in range(kinds):
        yield tuple(4 if kind == i else 2 for i in range(kinds))


def _layer_mib(parameters: float, activation: float, checkpoint: float, sizes: tuple[int, ...], whole: float) -> dict:
    """A share `whole` of the activations is on every rank of a tensor-parallel group."""
    shares = {str(n): activation * (whole + (1 - whole) / n) for n in sizes}
    return {"parameter_size": parameters, "tp_activation_per_bsz_dict": shares | {"checkpoint": checkpoint}}


def _ends_mib(states: float, activation: float, sizes: tuple[int, ...]) -> dict[str, Any]:
    return {
        name: {str(n): mib / n for n in sizes} for name, mib in (("model_states", states), ("activation", activation))
    }


_ALL = (1, 2, 4, 8)
LLAMA_TIMES = _of_layers((2048,), _one_more_of_each(1), (1, 2, 4, 8), (5.25,), (1.5, 2.25))
GALVATRON = {
    "llama_times.json": LLAMA_TIMES,
    "llama_falling_times.json": LLAMA_TIMES | {"layernum[2]_bsz1_seq2048": 90.0, "layernum[4]_bsz1_seq2048": 130.0},
    "llama_memory.json": {
        "layertype_0": {"2048": _layer_mib(772.0, 301.0, 16.0, _ALL, 0.25)},
        "layertype_0_sp": {"2048": _layer_mib(772.0, 430.0, 16.0, _ALL, 0.0)},
        "other_memory_pp_off": {"2048": _ends_mib(4000.0, 600.0, _ALL)},
        "other_memory_pp_off_sp": {"2048": _ends_mib(4000.0, 640.0, _ALL)},
    },
    "vit_times.json": _of_layers((197,), _one_more_of_each(1), (8, 16, 32), (0.625,), (2.0, 0.25)),
    "vit_memory.json": {
        "layertype_0": {"197": _layer_mib(75.0, 22.0, 1.0, _ALL, 0.3125)},
        "other_memory_pp_off": {"197": _ends_mib(40.0, 8.0, _ALL)},
    },
    # What is left for embedding and head is negative, as in the published file of Swin.
    "swin_times.json": _of_layers(_LEVELS, _one_more_of_each(4), (1, 8, 32), (1.5, 1.25, 1.0, 0.75), (-0.5, 0.0)),
    "swin_memory.json": {
        f"layertype_{i}": {str(length): _layer_mib(4.75 * 4**i, 60.0 / 2**i, 4.0 / 2**i, _ALL, 0.25)}
        for i, length in enumerate(_LEVELS)
    }
    | {"other_memory_pp_off": {",".join(map(str, _LEVELS)): _ends_mib(180.0, 12.0, _ALL)}},
    "allreduce_bandwidth_1nodes_8gpus_per_node.json": {
        "allreduce_size_8_consec_1": 150.0,
        "allreduce_size_4_consec_1": 144.0,
        "allreduce_size_4_consec_0": 140.0,
        "allreduce_size_2_consec_1": 136.0,
        "allreduce_size_2_consec_0": 132.0,
    },
    "p2p_bandwidth_1nodes_8gpus_per_node.json": {"pp_size_2": 150.0, "pp_size_4": 140.0, "pp_size_8": 110.0},
    "sp_time_1nodes_8gpus_per_node.json": {
        f"{kind}_size_{n}_{mib}MB_time": (0.03125 + mib * slope * (1 + n / 16))
        for kind, slope in (("allreduce", 0.0078125), ("all2all", 0.00390625))
        for n in (2, 4, 8)
        for mib in (1, 16, 256, 1024)
    },
    "overlap_coefficient.json": {"overlap_coe": 1.125},
    "strategy.json": {
        "pp_deg": 2, "tp_sizes_enc": "2,2,1,1,1,1,4,4", "tp_consecutive_flags": "0,1,1,1,1,1,1,1",
        "dp_types_enc": "0,1,1,0,0,0,0,1", "use_sp": "0,0,0,0,0,0,1,1", "checkpoint": "1,0,1,0,0,1,0,0",
        "global_bsz": 64, "chunks": 4, "pp_division": "3,5", "pipeline_type": "gpipe", "default_dp_type": "zero2",
        "vtp": 2, "vsp": 1, "embed_sdp": 1,
    },
}  # fmt: skip


def write_given(folder: Path) -> None:
    """All input files, in subfolders of a folder."""
    for name in ("clusters", "settings", "galvatron", "models"):
        (folder / name).mkdir(parents=True)
    for name, content in CLUSTERS.items():
        (folder / f"clusters/{name}.json").write_text(document("shardwright.cluster", {"name": name, **content}))
    for name, settings in SETTINGS.items():
        (folder / f"settings/{name}.json").write_text(document("shardwright.profile_settings", settings))
    for name, table in GALVATRON.items():
        (folder / f"galvatron/{name}").write_text(json.dumps(table, indent=1))
    for path in sorted((HERE / "models").glob("*.json")):
        text = path.read_text()
        for pattern, replacement, _ in REWRITTEN:
            text = re.sub(pattern, replacement, text)
        (folder / f"models/{path.name}").write_text(text)
    shutil.copy(HERE / "toy.toml", folder / "toy.toml")


def as_measured(analytic: Path, measured: Path) -> None:
    """Copy a profile, with its numbers a little off, their spread told, and all marked as measured.

    Every column whose name ends in `_source` (or is `source`) says where a number is from; times end in `_s`. What a
    profile of another layout calls these columns is to be changed here.
    """
    shutil.copy(analytic, measured)
    with h5py.File(measured, "r+") as file:
        file.visititems(lambda name, held: _as_measured(file, name, held) if isinstance(held, h5py.Dataset) else None)


_OWN = {
    "process_bytes": 1 << 23,
    "communicator_bytes": 0,
    "interval": 0.0625,
    "reduction_s": 2**-12,
    "reduction_ranks": 2,
    "step_overhead_s": 2**-14,
    "reference_s": 2**-4,
}


def _as_measured(file: h5py.File, name: str, column: h5py.Dataset) -> None:
    table, _, last = name.rpartition("/")
    if not len(column):
        return
    if last.endswith("source"):
        column[...] = np.full(len(column), b"measured", column.dtype)
    elif last in _OWN:
        column[...] = np.full(len(column), _OWN[last], column.dtype)
    elif last.endswith("_error_s"):
        column[...] = _off(file[f"{table}/{last.removesuffix('_error_s')}_s"][()]) / 32
    elif table != "fits" and last.endswith("_s"):
        column[...] = _off(column[()])


def _off(times: np.ndarray) -> np.ndarray:
    """Times that are between 2.5 % too low and too high, without a pattern."""
    return times * (1 + (np.arange(len(times)) * 37 % 11 - 5) / 200)


def measurement_of(plans: list[dict[str, Any]], paces: list[float]) -> dict[str, Any]:
    """What running plans took, as if measured: times of the layers that each has, times a pace of its own."""
    head = {"format": "shardwright.measurement", "version": 6, "device": "toy", "backend": "gloo"}
    made = {"date": "2026-01-31", "versions": "torch 0", "attention": "sdpa", "allocator": ""}
    measured = [
        {"plan": plan, "ranks": [_rank(plan, rank, pace) for stage in plan["stages"] for rank in stage["ranks"]]}
        for plan, pace in zip(plans, paces, strict=True)
    ]
    return head | made | {"plans": measured}


def _rank(plan: dict[str, Any], rank: int, pace: float) -> dict[str, Any]:
    stage = next(i for i, each in enumerate(plan["stages"]) if rank in each["ranks"])
    layers = sum(high - low for low, high in plan["stages"][stage]["layers"])
    samples = plan["global_batch_size"] // plan["num_microbatches"] // plan["embedding"]["dp_size"]
    recomputed = plan["layers"][0]["recompute"] != "none"
    unit_s = pace * (1 + 0.5 * samples) / plan["embedding"]["tp_size"] / 1024
    times = {"embedding": 0.25 * unit_s, "layers": (1 + layers) * unit_s, "head": 0.5 * unit_s}
    back = {name: (2 + (recomputed and name == "layers")) * time for name, time in times.items()}
    passes = [
        {"kind": kind, "microbatch": i, "chunk": 0, "wait_s": 0.0, "start_s": 0.0, "time_s": time_s}
        for i in range(plan["num_microbatches"])
        for kind, time_s in (("forward", sum(times.values())), ("backward", sum(back.values())))
    ]
    step_s = sum(each["time_s"] for each in passes) + 5 * unit_s
    repeated = (1.5, 1.0, 0.9375)
    return {
        "rank": rank,
        "stage": stage,
        "step_s": [step_s * more for more in repeated],
        "reference_s": [0.0625 for _ in repeated],
        "segments": [
            {"name": n, "forward_s": [t * m for m in repeated], "backward_s": [back[n] * m for m in repeated]}
            for n, t in times.items()
        ],
        "gradient_reduction_s": [unit_s * more for more in repeated],
        "optimizer_s": [2 * unit_s * more for more in repeated],
        "passes": passes,
        "memory": _memory(plan, layers, samples, recomputed),
    }


def _memory(plan: dict[str, Any], layers: int, samples: int, recomputed: bool) -> dict[str, Any]:
    tp_size = plan["embedding"]["tp_size"]
    parameters = (200_960 * layers + 262_144) * 4 // tp_size
    kept = (100_000 if recomputed else 1_600_000) * samples * layers // tp_size
    held = {"parameters_bytes": parameters, "gradients_bytes": parameters, "optimizer_bytes": 2 * parameters}
    at_once = held | {"activations_bytes": kept, "buffers_bytes": 4096}
    sizes = {"embedding": 64_000 * samples, "layers": kept, "head": 900_000 * samples}
    return held | {
        "peak_bytes": sum(at_once.values()),
        "segments": [
            {
                "name": name,
                "activation_bytes": size,
                "forward_workspace_bytes": size // 8,
                "backward_workspace_bytes": size // 4,
            }
            for name, size in sizes.items()
        ],
        "process_bytes": 8 << 20,
        "peak_reserved_bytes": 0,
        "device_used_bytes": 0,
        "resident_bytes": 256 << 20,
    }
