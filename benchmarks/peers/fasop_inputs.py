"""FASOP's own layer times and constants as a problem of its space: transcribed figures, no code of its.

Its layer times are of micro-batch 1; how it scales them is written in its source by model, GPU and kind of layer.
"""

import csv
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fasop_problem import FasopProblem, LayerKind, NodeCosts
from numpy.typing import NDArray

from shardwright_search.space.configurations import divisors

_BACKWARD_AND_FORWARD = 3
_SEND_BETWEEN, _SEND_INSIDE = 1.05, 3.5
"""By which FASOP divides bandwidths of point-to-point messages."""


class Case(NamedTuple):
    """One of the peer's result tables."""

    table: str
    model: str
    counts: tuple[tuple[int, int], ...]
    """Nodes of A100 and A10 of each cluster."""
    setting: str = "default"


_UP_TO_4 = tuple((a, b) for a in range(5) for b in range(5) if 0 < a + b <= 4)
CASES = (
    Case("head_rerun_bert", "bert", ((0, 4),)),
    Case("head_rerun_bert_het", "bert", ((1, 3),)),
    Case("head_rerun_gpt2", "gpt2XL", ((0, 8),)),
    Case("head_rerun_gpt2_het", "gpt2XL", ((1, 7),)),
    Case("head_rerun_T5", "T5", ((0, 8),)),
    Case("head_rerun_T5_het", "T5", ((1, 7),)),
    Case("head_rerun_gpt2XL_pareto_n4", "gpt2XL", _UP_TO_4, "pareto"),
)
GPUS = ("A100", "A10")

_MODELS: dict[str, dict[str, int]] = {
    "gpt2XL": {"hidden": 1600, "sequence_length": 1024, "blocks": 48, "vocabulary": 50257, "heads": 16, "batch": 64},
    "bert": {"hidden": 1024, "sequence_length": 512, "blocks": 24, "vocabulary": 30522, "heads": 16, "batch": 256},
    "T5": {"hidden": 1024, "sequence_length": 512, "blocks": 48, "vocabulary": 30522, "heads": 32, "batch": 128},
}
_BITS_PER_S = {
    "default": {"A100": (40.0e9, 1840.0e9), "A10": (40.0e9, 128.0e9)},
    "pareto": {"A100": (400.0e9, 1840.0e9), "A10": (100.0e9, 252.0e9)},
}
_USD = {"default": (32.7726, 8.144), "pareto": (32.7726, 9.773)}
_LIMIT_GIB = (39.59, 22.20)


def problem_of(case: Case, times: Path) -> FasopProblem:
    """Its cluster's node types are A100 and A10, in that order."""
    known = _MODELS[case.model]
    kinds = _kinds(case.model, known["blocks"])
    forward_s = read_times(times)
    sizes = [(tp_size, size) for tp_size in (1, 2, 4) for size in divisors(known["batch"])]
    hidden, words = known["hidden"], known["hidden"] * known["vocabulary"]
    whole = np.array([12 * hidden**2 if kind is LayerKind.BLOCK else words for kind in kinds], float)
    return FasopProblem(
        node_types=tuple(_node_costs(case.setting, number) for number in range(2)),
        devices_per_node=4 if case.setting == "default" else 8,
        batch=known["batch"],
        max_pp_size=known["blocks"],
        kinds=kinds,
        layer_ps={
            (gpu, tp_size, size): layer_ps(case.model, gpu, forward_s[case.model, gpu, tp_size], kinds, size)
            for gpu in GPUS
            for tp_size, size in sizes
        },
        parameters={tp_size: whole / tp_size for tp_size in (1, 2, 4)},
        reduced={tp_size: _reduced(kinds, hidden, words, tp_size) for tp_size in (1, 2, 4)},
        tied=0 if case.model == "T5" else words,
        outer_once=True,
        hidden=hidden,
        sequence_length=known["sequence_length"],
        vocabulary=known["vocabulary"],
        heads=known["heads"],
    )  # fmt: skip


def _kinds(model: str, blocks: int) -> tuple[LayerKind, ...]:
    """T5's decoder begins with an embedding of its own, and what comes last is inside its last layer."""
    block = (LayerKind.BLOCK,)
    if model == "T5":
        return ((LayerKind.EMBEDDING,) + block * (blocks // 2)) * 2
    return (LayerKind.EMBEDDING, *block * blocks, LayerKind.HEAD)


def _reduced(kinds: tuple[LayerKind, ...], hidden: int, words: int, tp_size: int) -> NDArray[Any]:
    block = (12 * hidden**2 + 20800) / tp_size
    return np.array([block if kind is LayerKind.BLOCK else words for kind in kinds], float)


def _node_costs(setting: str, number: int) -> NodeCosts:
    between, inside = (bits / 8 for bits in _BITS_PER_S[setting][GPUS[number]])
    return NodeCosts(
        name=GPUS[number],
        limit_gib=_LIMIT_GIB[number],
        usd_per_hour=_USD[setting][number],
        send_inside=inside / _SEND_INSIDE,
        send_between=between / _SEND_BETWEEN,
        reduce_inside=inside,
        reduce_between=between,
        shares_inside=GPUS[number] == "A10",
    )


@lru_cache(maxsize=4)
def read_times(file: Path) -> dict[tuple[str, str, int], NDArray[Any]]:
    """Forward seconds of every layer by model, GPU and tp_size."""
    found: dict[tuple[str, str, int], list[float]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            key = row["model"], row["gpu"], int(row["tp"])
            found.setdefault(key, []).extend([float(row["forward_s"])] * int(row["count"]))
    return {key: np.array(values) for key, values in found.items()}


def layer_ps(model: str, gpu: str, forward_s: NDArray[Any], kinds: tuple[LayerKind, ...], size: int) -> NDArray[Any]:
    """Forward and backward of a microbatch of that size, in picoseconds."""
    places = [_place(model, kinds, layer) for layer in range(len(kinds))]
    scale = np.array([growth(model, gpu, place, size) for place in places])
    return np.rint(_BACKWARD_AND_FORWARD * forward_s * scale * 1e12).astype(np.int64)


def _place(model: str, kinds: tuple[LayerKind, ...], layer: int) -> str:
    """What its source tells layers apart by."""
    if model != "T5":
        return kinds[layer].name.lower()
    late = layer >= len(kinds) // 2
    return ("late_" if late else "") + kinds[layer].name.lower()


def growth(model: str, gpu: str, place: str, size: int) -> float:
    """By how much a layer's time at micro-batch 1 is multiplied, by its source's hand-written factors.

    Sizes below the first that it has a factor for cost as one sample does, those above the last grow in proportion.
    """
    if model == "gpt2XL" or place == "head":
        return float(size)  # its source leaves out embedding and head on an A100: one of the named defects
    known = _GROWTH[model, gpu, place]
    last = max(known)
    return 1.0 if size < min(known) else known[size] if size in known else known[last] * size / last


_T5_A10_EMBEDDING = {2: 1.2, 4: 1.2 * 1.2, 8: 1.2 * 1.2 * 1.4, 16: 1.2 * 1.2 * 1.4 * 1.6}
# Its source has a second set for the decoder's embedding and never uses it.
_T5_A100_EMBEDDING = dict(zip((2, 4, 8, 16, 32), np.cumprod([1.386, 1.244, 1.356, 1.055, 1.368]).tolist(), strict=True))
_GROWTH: dict[tuple[str, str, str], dict[int, float]] = {
    ("bert", "A10", "embedding"): {4: 1.0},
    ("bert", "A10", "block"): {8: 2.0},
    ("bert", "A100", "embedding"): {8: 1.385, 16: 1.385 * 1.589, 32: 1.385 * 1.589 * 1.565},
    ("bert", "A100", "block"): {8: 1.236, 16: 1.235 * 1.658},
    ("T5", "A10", "embedding"): _T5_A10_EMBEDDING,
    ("T5", "A10", "late_embedding"): _T5_A10_EMBEDDING,
    ("T5", "A10", "block"): {2: 1.140},
    ("T5", "A10", "late_block"): {2: 1.094},
    ("T5", "A100", "embedding"): _T5_A100_EMBEDDING,
    ("T5", "A100", "late_embedding"): _T5_A100_EMBEDDING,
    ("T5", "A100", "block"): {4: 1.173, 8: 1.173 * 1.489},
    ("T5", "A100", "late_block"): {4: 1.142, 8: 1.142 * 1.683},
}
