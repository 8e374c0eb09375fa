"""S1: grouped matrix products by expert against a loop in float64, also with experts that have no row."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.workbench import row_counts
from gpu_kit.worlds import device_of
from harness import table
from torch import Tensor

from shardwright_train.parallel.experts import expert_products

_COUNTS = {"none, one, odd and many rows": (0, 1, 7, 8, 4096), "the last has none": (8, 4096, 0), "one row": (0, 1, 0)}
_TINY = 24
"""Maximum number of rows of an expert in a rehearsal."""
_BOUND = 2.0**-7
"""Bound on errors of bfloat16 results whose sums are in float32: twice the rounding of the results themselves."""


def rows(setting: Setting) -> list[Row]:
    """Return a row for each list of row counts."""
    return [Row(f"experts: {name}", partial(_products, setting, counts)) for name, counts in _COUNTS.items()]


def _products(setting: Setting, counts: tuple[int, ...]) -> Values:
    """Compare results and gradients with those of a loop; memory that a kernel leaves unwritten has NaN."""
    counts = tuple(min(n, setting.size(4096, _TINY)) for n in counts)
    device, inputs, outputs = device_of(setting), *setting.size((512, 768), (32, 48))
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    x = drawn(sum(counts), inputs).requires_grad_()
    weights = (drawn(len(counts), outputs, inputs) / inputs**0.5).requires_grad_()
    gradient = drawn(sum(counts), outputs)
    _poison(setting, device, 8 * weights.nbytes + 8 * x.nbytes)
    y = expert_products(x, weights, row_counts(torch.tensor(counts, device=device)))
    y.backward(gradient)
    wide_x, wide = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    parts = zip(wide_x.split(counts), wide.unbind(), strict=True)
    exact = torch.cat([part @ matrix.T for part, matrix in parts])
    exact.backward(gradient.double())
    pairs = {"results": (y, exact), "rows": (x.grad, wide_x.grad), "matrices": (weights.grad, wide.grad)}
    found: Values = {name: _distance(mine, wanted) for name, (mine, wanted) in pairs.items()}
    return found | {"well": all(value <= _BOUND for value in found.values()), "kernel": type(y.grad_fn).__name__}


def _poison(setting: Setting, device: torch.device, size: int) -> None:
    """Fill with NaN the memory that the allocator hands out next."""
    if setting.on_cuda:
        pieces = [torch.full((size // 16,), float("nan"), device=device) for _ in range(4)]
        del pieces


def _distance(mine: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference divided by the largest wanted value; NaN if any value is NaN."""
    assert mine is not None and wanted is not None
    return float((mine.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max())


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of grouped matrix products."""
    told = [
        [
            name.removeprefix("experts: "),
            *(f"{row[part]:.1e}" for part in ("results", "rows", "matrices")),
            "yes" if row["well"] else "**no**",
            row["kernel"],
        ]
        for name, row in rows.items()
        if name.startswith("experts: ")
    ]
    return [*table("rows of experts|results|gradients of rows|of matrices|well|made by", told)]
