"""Megatron-LM's layout string of a pipeline, `Et*3|(tt|)*29|m|L`: which range of layers each stage and chunk has.

`E` is the embedding, `t` a layer, `m` one that predicts a further token (MTP), `L` head and loss; `|` ends a range,
which may be empty, and `*` repeats a sign, or what is in parentheses. Commas mean nothing. Source:
`core/transformer/pipeline_parallel_layer_layout.py` of megatron-core 0.16.1.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.types import MAX_LAYERS

_ARGUMENT = "pipeline_model_parallel_layout"
_MAX_SIGNS = 4 * MAX_LAYERS
"""Signs of a layout with its repetitions written out, which are enough for the most layers, each in its own range."""
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_SIGN = re.compile(r"(.)\*(\d+)")
_WHOLE = re.compile(r"E[t|]*(m*)\|*L")
_SIGNS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_SHOWN = 60


class Layout(NamedTuple):
    """The number of layers of each range."""

    sizes: list[int]
    """Decoder layers of each range, in the order in which a microbatch goes through them."""
    mtp_layers: int
    mtp_range: int
    """The range that has those that predict further tokens; the last one where there are none."""


def read_layout(file: str, layout: str) -> Layout:
    """Return the layers of each range; raise BadInput for layouts that Megatron-LM refuses."""
    expanded = layout.replace(",", "")
    for pattern in (_GROUP, _SIGN):
        expanded = _expanded(file, expanded, pattern)
    whole = _WHOLE.fullmatch(expanded)
    if whole is None:
        remedy = "write it as in Et*3|(tt|)*4L: one E first, one L last, and * after each parenthesis"
        raise BadInput(file, f"{_ARGUMENT} {layout[:_SHOWN]!r} is not understood", remedy)
    ranges = expanded.split("|")
    mtp_range = next((i for i, part in enumerate(ranges) if "m" in part), len(ranges) - 1)
    return Layout([part.count("t") for part in ranges], len(whole[1]), mtp_range)


def layout_of_lists(rows: Sequence[Sequence[object]]) -> str:
    """Return the layout string for lists of names, one for each range; unknown names are unchanged."""
    return "|".join("".join(_SIGNS.get(str(name).strip().lower(), str(name)) for name in row) for row in rows)


def written_layout(sizes: Sequence[int], mtp_range: int = 0, mtp_layers: int = 0) -> str:
    """Return the layout of ranges of these sizes, of which one also has the MTP layers."""
    ranges = [f"t*{size}" if size else "" for size in sizes]
    ranges[mtp_range] += "m" * mtp_layers
    return f"E{'|'.join(ranges)}L"


def _expanded(file: str, layout: str, pattern: re.Pattern[str]) -> str:
    """Return a layout with one kind of repetition written out; BadInput before there is one of too many layers."""
    parts, at, left = list[str](), 0, _MAX_SIGNS - len(layout)
    for match in pattern.finditer(layout):
        count = int(match[2]) if len(match[2]) < len(str(_MAX_SIGNS)) else _MAX_SIGNS
        left -= len(match[1]) * count
        if left < 0:
            problem = f"{_ARGUMENT} {layout[:_SHOWN]!r} is of more than {MAX_LAYERS} layers"
            raise BadInput(file, problem, "correct the layout")
        parts += [layout[at : match.start()], match[1] * count]
        at = match.end()
    return "".join((*parts, layout[at:]))
