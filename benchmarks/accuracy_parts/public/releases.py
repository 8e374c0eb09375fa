"""What a release of Megatron did beside its plan: the dispatcher of its experts, graphs and fused kernels.

Read from the notes of a row, which are those of the release's default configuration; a page that prints none takes the
newest earlier one of the same plan.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.estimate.runtimes import Graphs
from shardwright.types.strategy import Dispatcher

__all__ = ["experts_as_run", "release_of"]

_FUSIONS_FROM = 2606
"""First container whose MXFP8 recipes fuse experts and run attention in FP8 (Megatron-Bridge v0.5.0)."""
_RECIPES_FROM = 2608
"""First container whose rows print no configuration: these are `perf_recipes` of Megatron-Bridge 067f987."""
_GRAPHS_FROM = 2602
_HYBRID_FROM = 2511


def release_of(row: Mapping[str, str]) -> int:
    """The release of a row as a number, such as 2606: its container's, else that of its tag; 2407 if it names none."""
    found = re.search(r"container (\d\d)\.(\d\d)", row["note"]) or re.match(r"v(\d\d)\.(\d\d)", row["tag"])
    return int(found[1]) * 100 + int(found[2]) if found else 2407


def experts_as_run(row: Mapping[str, str], same_plan: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """What the runtime of a row with experts did, as fields of `Runtime`, given all rows of its plan."""
    release, in_rack = release_of(row), row["gpu"] in ("GB200", "GB300")
    if release >= _RECIPES_FROM and row["precision"] == "MXFP8" and in_rack:
        return _made(Dispatcher.PER_NODE, overlapped=True, graphs=Graphs.FULL, fused=True)
    dispatcher, overlapped = _stated(row)
    if dispatcher is None:
        earlier = [other for other in same_plan if release_of(other) <= release and _stated(other)[0]]
        if earlier:
            dispatcher, overlapped = _stated(max(earlier, key=release_of))
        else:
            hybrid = in_rack and release >= _HYBRID_FROM and row["model"] != "gpt-oss-120b"
            dispatcher = Dispatcher.PER_NODE if hybrid else Dispatcher.ALL_TO_ALL
    fused = release >= _FUSIONS_FROM and row["precision"] == "MXFP8" and overlapped
    graphs = Graphs.PARTIAL if release >= _GRAPHS_FROM and _has_graphs(row["model"], row["gpu"]) else Graphs.NONE
    return _made(dispatcher, overlapped=overlapped, graphs=graphs, fused=fused)


def _made(dispatcher: Dispatcher, *, overlapped: bool, graphs: Graphs, fused: bool) -> dict[str, Any]:
    return {
        "dispatcher": dispatcher,
        "overlaps_experts": overlapped,
        "graphs": graphs,
        "fused_experts": fused,
        "fp8_attention": fused,
    }


def _stated(row: Mapping[str, str]) -> tuple[Dispatcher | None, bool]:
    """The dispatcher that a row's notes name, and whether its messages overlap; None if they print no configuration.

    On H100 `deepep` is the backend's name, which does not switch the flexible dispatcher on (known limitations of
    Megatron-Bridge's skills).
    """
    note, overlapped = row["note"], "EP all-to-all overlap on" in row["note"]
    if "dispatcher hybridep" in note or ("dispatcher deepep" in note and row["gpu"] != "H100"):
        return Dispatcher.PER_NODE, overlapped
    configured = "dispatcher deepep" in note or "recompute from the default config" in note
    return Dispatcher.ALL_TO_ALL if configured or "nchmarking" in row["source"] else None, overlapped


def _has_graphs(model: str, gpu: str) -> bool:
    """Whether its default configurations capture attention and the router (cuda_graph_scope of v0.3 to v0.5)."""
    return {
        "qwen3-30b-a3b": gpu != "H100",
        "qwen3-235b-a22b": gpu in ("GB200", "GB300"),
        "deepseek-v3": gpu == "GB200",
        "gpt-oss-120b": gpu in ("B300", "GB300"),
        "kimi-k2": True,
    }.get(model, False)
