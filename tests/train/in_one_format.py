"""Parts of stock models that compute in float32 whatever their input, made to compute in its format.

Stock adds the gradients of norms' weights over samples in float32, where the order of the samples shows, and rounds
what it rotates, and weights of keys, whose order may be another: no two plans would agree to 1e-10 in float64.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.modernbert import modeling_modernbert

__all__ = ["compute_in_the_inputs_format"]


def compute_in_the_inputs_format() -> None:
    """Replace these parts in this process."""
    nn.functional.softmax = _softmax
    modeling_modernbert.apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb
    for norm in (Gemma2RMSNorm, Gemma3RMSNorm):
        norm.forward = lambda self, x: self._norm(x) * (1.0 + self.weight)  # type: ignore[assignment]
    for module, layer_norm in (
        (modeling_cohere, modeling_cohere.CohereLayerNorm),
        (modeling_cohere2, modeling_cohere2.Cohere2LayerNorm),
    ):
        layer_norm.forward = _divided_by_deviation  # type: ignore[assignment]
        module.apply_rotary_pos_emb = _rotated_in_pairs
    modeling_llama4.Llama4TextRMSNorm.forward = lambda self, x: self._norm(x) * self.weight
    modeling_llama4.Llama4TextL2Norm.forward = lambda self, x: self._norm(x)
    modeling_llama4.Llama4Router.forward = _chosen_by_sigmoid
    modeling_llama4.apply_rotary_emb = _turned_heads_last
    for norm in (DeepseekV2RMSNorm, DeepseekV3RMSNorm, modeling_llama.LlamaRMSNorm, MixtralRMSNorm):
        norm.forward = _divided_by_root  # type: ignore[assignment]
    modeling_deepseek_v2.apply_rotary_emb = _turned_by  # type: ignore[assignment]


def _softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x, dim, x.dtype if x.dtype is torch.float64 else dtype)


def _divided_by_deviation(self: Any, x: Tensor) -> Tensor:
    distance = x - x.mean(-1, keepdim=True)
    scaled: Tensor = (
        self.weight * distance * torch.rsqrt(distance.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )
    return scaled


def _divided_by_root(self: Any, x: Tensor) -> Tensor:
    scaled: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
    return scaled


def _turned_by(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.view_as_real(_as_complex(x) * angles[:, None]).flatten(-2).to(x.dtype) for x in (q, k))


def _turned_heads_last(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.view_as_real(_as_complex(x) * angles[:, :, None]).flatten(-2).to(x.dtype) for x in (q, k))


def _as_complex(x: Tensor) -> Tensor:
    """Pairs of features as complex numbers, which have no 16 bits."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    return torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())


def _chosen_by_sigmoid(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(x, self.weight)
    scores, index = logits.topk(self.top_k, -1)
    return torch.full_like(logits, -torch.inf).scatter(1, index, scores).sigmoid(), logits


def _rotated_in_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
