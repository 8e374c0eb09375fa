"""Optimizers of one process, as PyTorch has them or as they were published, for plans that name another than AdamW."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from shardwright.types import Plan

Groups = list[dict[str, Any]]
OTHERS = ("adamw-bf16", "adamw-8bit", "sgd", "lion")


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
    """The optimizer of that name; `groups` have one parameter each, and its shape in the model's description."""
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=betas, eps=eps),
        "adamw-bf16": lambda: Rounded(groups, betas=betas, eps=eps),
        "adamw-8bit": lambda: EightBits(groups, betas=betas, eps=eps),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "lion": lambda: Lion(groups, {}),
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
