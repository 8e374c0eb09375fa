"""What of a step was allocated where at its peak, by the history of PyTorch's allocator."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

_OWN = ("shardwright_train", "transformers")
_LARGEST = 15


def at_the_peak(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes that were resident at the peak, by the innermost line of a model or this project, largest first.

    `events` are those of one device, in order, as `torch.cuda.memory._snapshot` gives them.
    """
    live: dict[int, Mapping[str, Any]] = {}
    held = most = 0
    peak: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            held += event["size"]
            sizes[_place(event)] += event["size"]
            if held > most:
                most, peak = held, sizes.copy()
        elif event["action"] == "free_completed" and (gone := live.pop(event["addr"], None)) is not None:
            held -= gone["size"]
            sizes[_place(gone)] -= gone["size"]
    return {place: size for place, size in peak.most_common(_LARGEST) if size > 0}


def _place(event: Mapping[str, Any]) -> str:
    for frame in event.get("frames", ()):
        if any(name in frame["filename"] for name in _OWN):
            return f"{PurePath(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "elsewhere"
