"""The attention kernels that a plan may ask for."""

from enum import StrEnum


class Attention(StrEnum):
    """Attention kernels."""

    AUTO = "auto"
    """The fastest that the device and the installation have."""
    SDPA = "sdpa"
    """PyTorch's scaled_dot_product_attention; on a GPU by the fused kernel that PyTorch prefers, on Hopper cuDNN's."""
    SDPA_MATH = "sdpa_math"
    """PyTorch's attention by matrix products that keep all scores, which is slow on a GPU."""
    SDPA_FLASH = "sdpa_flash"
    """PyTorch's own FlashAttention-2 and no other kernel, as context parallelism has it in 16 bits."""
    SDPA_EFFICIENT = "sdpa_efficient"
    """PyTorch's memory-efficient kernel and no other; on GPUs only."""
    SDPA_CUDNN = "sdpa_cudnn"
    """cuDNN's kernel and no other; on GPUs only, and not across ranks."""
    FLASH_ATTENTION_2 = "flash_attention_2"
    """The flash-attn package (Dao 2023)."""
    EAGER = "eager"
    """Plain matrix products and a softmax."""


FUSED_SDPA = (Attention.SDPA, Attention.SDPA_FLASH, Attention.SDPA_EFFICIENT, Attention.SDPA_CUDNN)
"""PyTorch's attention by kernels that keep no scores."""
