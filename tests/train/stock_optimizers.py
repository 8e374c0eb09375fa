"""Optimizers of one process, as PyTorch has them or as they were published, for plans that name another than AdamW."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from shardwright.types import Plan

Groups = list[dict[str, Any]]
Matrices = tuple[tuple[int, ...], tuple[int, int]]
"""A described shape, and the two dims of a matrix in it."""
OTHERS = ("adamw-bf16", "adamw-8bit", "sgd", "lion", "muon")


WITHOUT_LION = {
    *("gpt2", "bert", "roberta", "xlm-roberta", "siglip", "llava", "gemma3", "vit", "swin", "glm4"),
}
"""Families with gradients that are 0 but for rounding, as of biases of keys: Lion takes their sign."""


def with_optimizers(plans: Iterable[Plan], names: Sequence[str] = OTHERS, first: int = 0) -> list[Plan]:
    """Plans that name these optimizers in turns; another than Lion where its steps are of rounding."""
    turns = ((plan, names[number % len(names)]) for number, plan in enumerate(plans, first))
    named = [(plan, "sgd" if name == "lion" and plan.model.family in WITHOUT_LION else name) for plan, name in turns]
    return [replace(plan, name=f"{name} {plan.name}", optimizer=name) for plan, name in named]


def stock_optimizer(name: str, groups: Groups, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """The optimizer of that name; `groups` have one parameter each, and its shape in the model's description.

    Those of blocks' matrices have these, too.
    """
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=betas, eps=eps),
        "adamw-bf16": lambda: Rounded(groups, betas=betas, eps=eps),
        "adamw-8bit": lambda: EightBits(groups, betas=betas, eps=eps),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "lion": lambda: Lion(groups, {}),
        "muon": lambda: Muon(groups, betas, eps),
    }
    return made[name]()


class Rounded(torch.optim.AdamW):
    """AdamW whose averages are rounded after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            (parameter,) = group["params"]
            shape = group.get("shape") or parameter.shape
            for average in ("exp_avg", "exp_avg_sq"):
                kept = self.state[parameter][average]
                kept.copy_(self.rounded(average, kept.view(shape)).view(kept.shape))

    def rounded(self, _average: str, values: Tensor) -> Tensor:
        return values.bfloat16()


class EightBits(Rounded):
    """AdamW whose averages of matrices are the nearest multiples of 256 values of the largest one of 256 in a row."""

    def rounded(self, average: str, values: Tensor) -> Tensor:
        if values.dim() < 2:
            return values
        signed = average == "exp_avg"
        table = dynamic_map(signed).to(values.dtype)
        kept = torch.zeros_like(values)
        for begin in range(0, values.size(-1), 256):
            part = values[..., begin : begin + 256]
            scale = part.abs().amax(-1, keepdim=True).float().to(values.dtype)
            share = part / torch.where(scale == 0, 1, scale)
            code = (share.unsqueeze(-1) - table).abs().argmin(-1)
            code = torch.where(share > 0, code.clamp(min=0 if signed else 1), code)
            kept[..., begin : begin + 256] = table[code] * scale
        return kept


def dynamic_map(signed: bool) -> Tensor:
    """The values of bitsandbytes' create_dynamic_map, in its own way."""
    data = [0.0, 1.0]
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1, dtype=torch.float64)
        means = (10 ** (-6 + i)) * (boundaries[:-1] + boundaries[1:]) / 2
        data += means.tolist() + (-means).tolist() * signed
    assert len(data) == 256
    return torch.tensor(sorted(data), dtype=torch.float64)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, line by line, with the betas of their experiments."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for theta in group["params"]:
                g, eta, decay = theta.grad, group["lr"], group["weight_decay"]
                m = self.state[theta].setdefault("m", torch.zeros_like(theta))
                c = 0.9 * m + (1 - 0.9) * g
                theta -= eta * (c.sign() + decay * theta)
                m.copy_(0.99 * m + (1 - 0.99) * g)


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon for each matrix, a parameter of its own, and its AdamW for the rest."""

    def __init__(self, groups: Groups, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {})
        whole = [group for group in self.param_groups if group.get("matrices")]
        rest = [group for group in self.param_groups if not group.get("matrices")]
        self._adamw = torch.optim.AdamW([{**group} for group in rest], betas=betas, eps=eps) if rest else None
        self._muon = [torch.optim.Muon(_matrices(g, g["params"][0].detach()), adjust_lr_fn=ADJUST) for g in whole]
        self._groups = rest, whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rest, whole = self._groups
        for mine, group in zip(self._adamw.param_groups if self._adamw else (), rest, strict=True):
            mine["lr"] = group["lr"]
        if self._adamw:
            self._adamw.step()
        for muon, group in zip(self._muon, whole, strict=True):
            (parameter,), (one,) = group["params"], muon.param_groups
            one["lr"], one["weight_decay"] = group["lr"], group["weight_decay"]
            for matrix, gradient in zip(one["params"], _matrices(group, parameter.grad), strict=True):
                matrix.grad = gradient.detach()
            with iterating_in(parameter.dtype):
                muon.step()


ADJUST = "match_rms_adamw"


def _matrices(group: dict[str, Any], values: Tensor) -> list[nn.Parameter]:
    """Views of the matrices of a parameter, which has those of several described ones in turn."""
    parts: list[Matrices] = group["matrices"]
    pieces = values.split([shape[0] for shape, _ in parts]) if len(parts) > 1 else [values]
    found = list[nn.Parameter]()
    for piece, (shape, dims) in zip(pieces, parts, strict=True):
        stacked = piece.view(shape).movedim(dims, (-2, -1))
        places = product(*map(range, stacked.shape[:-2]))
        found += [nn.Parameter(stacked[place], requires_grad=False) for place in places]
    return found


@contextmanager
def iterating_in(dtype: torch.dtype) -> Iterator[None]:
    """Let PyTorch's Muon iterate in float64, where that is the dtype, instead of bfloat16."""

    def iterate(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        made = x.T if x.size(0) > x.size(1) else x
        made = made / made.norm().clamp(min=eps)
        for _ in range(steps):
            gram = made @ made.T
            made = a * made + (b * gram + c * gram @ gram) @ made
        return made.T if x.size(0) > x.size(1) else made

    if dtype is torch.float64:
        with patch("torch.optim._muon._zeropower_via_newtonschulz", iterate):
            yield
    else:
        yield
