"""S1: attention in blocks, merged over four pieces of keys, against plain attention in float64."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.worlds import device_of
from harness import table
from torch import Tensor

from shardwright_train.parallel.attention_blocks import Block, nothing_attended

_PIECES = 4
_BOUND = {"bfloat16": 2.0**-5, "float32": 2.0**-12}
"""Bounds on errors over the largest value: results and gradients are rounded in each piece and each sum of pieces."""


class _Case(NamedTuple):
    dtype: str
    heads: int
    kv_heads: int
    features: int
    of_values: int
    documents: bool = False


_CASES = {
    "bf16, 64": _Case("bfloat16", 8, 8, 64, 64),
    "bf16, 72": _Case("bfloat16", 8, 8, 72, 72),
    "bf16, 128 in groups": _Case("bfloat16", 8, 2, 128, 128),
    "bf16, 192 and 128 (latents)": _Case("bfloat16", 8, 8, 192, 128),
    "bf16, 64, documents": _Case("bfloat16", 8, 2, 64, 64, documents=True),
    "fp32, 64 in groups": _Case("float32", 8, 2, 64, 64),
    "fp32, 64, documents": _Case("float32", 8, 2, 64, 64, documents=True),
}


def rows(setting: Setting) -> list[Row]:
    """Return a row for each case."""
    return [Row(f"ring: {name}", partial(_blocks, setting, case)) for name, case in _CASES.items()]


def _blocks(setting: Setting, case: _Case) -> Values:
    """Compare attention of the last piece's queries to all four pieces with plain attention; the last is causal."""
    device, dtype, length = device_of(setting), getattr(torch, case.dtype), setting.size(512, 16)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, positions: int, features: int) -> Tensor:
        return torch.randn(2, heads, positions, features, device=device, generator=generator).to(dtype)

    query = drawn(case.heads, length, case.features)
    key = drawn(case.kv_heads, _PIECES * length, case.features)
    value = drawn(case.kv_heads, _PIECES * length, case.of_values)
    gradient = drawn(case.heads, length, case.of_values)
    seen = _seen(case, length, device)
    blocks = [_block(case, seen, piece, length) for piece in range(_PIECES)]
    keys, values = key.split(length, 2), value.split(length, 2)
    total = nothing_attended(query, case.of_values)
    for block, k, v in zip(blocks, keys, values, strict=True):
        total.add(block.attend(query, k, v))
    attended = total.rounded(dtype)
    pieces = [block.backward(gradient, query, k, v, attended) for block, k, v in zip(blocks, keys, values, strict=True)]
    mine = [attended.output, sum(piece[0].float() for piece in pieces)]
    mine += [torch.cat([piece[i] for piece in pieces], 2) for i in (1, 2)]
    wanted = _plain(query, key, value, gradient, seen)
    names = ("output", "queries", "keys", "values")
    found: Values = {
        name: float((a.double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(names, mine, wanted, strict=True)
    }
    kernel = "cpu" if query.device.type == "cpu" else "flash" if blocks[0]._is_flash(query) else "efficient"
    return found | {"kernel": kernel, "well": all(error <= _BOUND[case.dtype] for error in found.values())}


def _seen(case: _Case, length: int, device: torch.device) -> Tensor:
    """Return which keys the last piece's queries see [queries, keys]; with documents, from half a piece before it."""
    positions = torch.arange(_PIECES * length, device=device)
    seen = positions[-length:, None] >= positions
    return seen & (positions >= positions[-length] - length // 2) if case.documents else seen


def _block(case: _Case, seen: Tensor, piece: int, length: int) -> Block:
    scale = case.features**-0.5
    if case.documents:
        return Block(scale, seen=seen[None, None, :, piece * length : (piece + 1) * length])
    return Block(scale, is_causal=piece == _PIECES - 1)


def _plain(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, seen: Tensor) -> list[Tensor]:
    """Return the output and the gradients of plain attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in (query, key, value))
    more = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(more, 1).mT * q.shape[-1] ** -0.5
    output = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(more, 1)
    output.backward(gradient.double())
    return [output.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of attention in blocks."""
    told = [
        [name.removeprefix("ring: "), row["kernel"]]
        + [f"{row[part]:.1e}" for part in ("output", "queries", "keys", "values")]
        + ["yes" if row["well"] else "**no**"]
        for name, row in rows.items()
        if name.startswith("ring: ")
    ]
    return [*table("blocks of attention|kernel|output|gradients of queries|of keys|of values|well", told)]
