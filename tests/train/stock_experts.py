"""Stock models with experts, made a reference: routers in the format of their input, and a balance loss per sample."""

from typing import Any

from torch import Tensor, nn


def with_balance(stock: nn.Module) -> nn.Module:
    """A stock model, of which parts with experts say their balance loss, summed over samples, as `auxiliary`.

    Stock routers compute in float32, whose rounding would differ between plans in float64; and the stock loss is one of
    all layers and samples together.
    """
    parts = [module for module in stock.modules() if hasattr(module, "experts") and router_of(module) is not None]
    config: Any = stock.config
    for part in parts:
        config._experts_implementation = "eager"
        strength = config.router_aux_loss_coef / len(parts)
        if hasattr(part, "gate"):
            part.gate.register_forward_hook(_widened)
        part.register_forward_hook(lambda part, inputs, _, strength=strength: _note(part, inputs[0], strength))
    return stock


def router_of(part: Any) -> Any:
    """The router of a part with experts; None where it has none."""
    return getattr(part, "gate", getattr(part, "router", None))


def _widened(router: Any, inputs: tuple[Tensor], _: object) -> tuple[Tensor, Tensor, Tensor]:
    logits = inputs[0] @ router.weight.T
    weights, index = logits.softmax(-1).topk(router.top_k, -1)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, index


def _note(part: Any, hidden: Tensor, strength: float) -> None:
    part.auxiliary = strength * sum(sample_balance(router_of(part), sample) for sample in hidden)


def sample_balance(router: Any, sample: Tensor) -> Tensor:
    """The loss of one sample [positions, hidden]: E sum_e f_e P_e."""
    logits = sample @ router.weight.T
    probabilities = (logits if getattr(router, "bias", None) is None else logits + router.bias).softmax(-1)
    chosen = probabilities.topk(router.top_k, -1).indices
    often = [(chosen == expert).sum() / len(sample) for expert in range(router.num_experts)]
    return router.num_experts * sum(f * p for f, p in zip(often, probabilities.mean(0), strict=True))
