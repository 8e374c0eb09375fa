"""Stock models with experts, made a reference: routers in the format of their input, and a balance loss per sample."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright_train.models.base import family_named
from shardwright_train.models.experts import Choice


def with_balance(stock: nn.Module) -> nn.Module:
    """A stock model, of which parts with experts say their balance loss, summed over samples, as `auxiliary`.

    Stock routers compute in float32, whose rounding would differ between plans in float64; and the stock loss is one of
    all layers and samples together.
    """
    parts = [module for module in stock.modules() if hasattr(module, "experts") and router_of(module) is not None]
    config: Any = stock.config
    for part in parts:
        config._experts_implementation = "eager"
        if hasattr(part.experts, "limit"):
            part.experts.limit = config.swiglu_limit  # transformers before 5.20 has 7.0 in every model
        strength = strength_of(config, len(parts))
        if hasattr(part, "gate"):
            part.gate.register_forward_hook(lambda _, inputs, __, part=part: _widened(part, config, inputs[0]))
        part.register_forward_hook(lambda part, inputs, _, strength=strength: _note(part, config, inputs[0], strength))
    return stock


def router_of(part: Any) -> Any:
    """The router of a part with experts; None where it has none."""
    router = getattr(part, "gate", getattr(part, "router", None))
    return router if not hasattr(router, "get_base_layer") else _Adapted(router)


class _Adapted:
    """A router with the low-rank matrices that peft gives it, which its own weight shows only while it computes."""

    def __init__(self, wrapper: Any) -> None:
        self.base = wrapper.get_base_layer()
        is_shown = hasattr(self.base, "parametrizations")
        self.weight = self.base.weight if is_shown else self.base.weight + wrapper.get_delta_weight("default")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


def strength_of(config: Any, layers: int) -> float:
    """The factor of the loss of a layer and a sample."""
    if config.model_type.startswith("deepseek"):
        return float(getattr(config, "aux_loss_alpha", 0.0)) / config.num_experts_per_tok
    return float(config.router_aux_loss_coef) / layers


def choice_of(part: Any, config: Any, x: Tensor) -> Choice:
    """What a part chooses in the format of its input; some as in runs, which tests hold to the stock one."""
    if config.model_type.startswith(("deepseek", "llama4")):
        family: Any = family_named(config.model_type, "test")
        return family.choose(SimpleNamespace(config=config, gate=router_of(part), router=router_of(part)), x)  # type: ignore[no-any-return]
    router = router_of(part)
    logits = x @ router.weight.T
    probabilities = (logits if getattr(router, "bias", None) is None else logits + router.bias).softmax(-1)
    weights, index = probabilities.topk(router.top_k, -1)
    normed = getattr(router, "norm_topk_prob", True)
    return Choice(probabilities, index, weights / weights.sum(-1, keepdim=True) if normed else weights)


def _widened(part: Any, config: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    choice = choice_of(part, config, x.reshape(-1, x.shape[-1]))
    return choice.probabilities, choice.weights, choice.experts


def correct_biases(stock: nn.Module, rate: float) -> None:
    """Correct the biases of a stock model's routers by what they chose since the last time."""
    for part in stock.modules():
        if (counts := getattr(part, "counts", None)) is not None:
            biases = router_of(part).e_score_correction_bias
            biases += rate * (counts.mean() - counts).sign()
            part.counts = torch.zeros_like(counts)


def _note(part: Any, config: Any, hidden: Tensor, strength: float) -> None:
    if hasattr(router_of(part), "e_score_correction_bias"):
        index = choice_of(part, config, hidden.flatten(0, 1)).experts.flatten()
        counted = index.bincount(minlength=config.n_routed_experts).double()
        part.counts = counted + getattr(part, "counts", 0)
    part.auxiliary = strength * sum(sample_balance(part, config, sample) for sample in hidden)
    _, part.shares = _load(part, config, hidden.flatten(0, 1))


def shares_of(stock: nn.Module) -> list[float]:
    """Share of each expert in the choices of its layer in the last pass, layer after layer."""
    return [share.item() for module in stock.modules() if hasattr(module, "shares") for share in module.shares]


def sample_balance(part: Any, config: Any, sample: Tensor) -> Tensor:
    """The loss of one sample [positions, hidden]: E sum_e f_e P_e."""
    choice, shares = _load(part, config, sample)
    often = choice.experts.shape[-1] * shares
    return len(often) * (often * choice.probabilities.mean(0)).sum()


def _load(part: Any, config: Any, x: Tensor) -> tuple[Choice, Tensor]:
    """What positions x [positions, hidden] choose, and the share of each expert in it [experts]."""
    choice = choice_of(part, config, x)
    often = [(choice.experts == expert).sum() for expert in range(choice.probabilities.shape[-1])]
    return choice, torch.stack(often) / choice.experts.numel()
