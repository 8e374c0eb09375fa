"""Granite 3 (Granite team 2024): Llama whose embedding, attention scores, residual sums and logits are scaled."""

from msgspec.structs import replace

from shardwright_models.families.llama import LLAMA

GRANITE = replace(
    LLAMA,
    model_type="granite",
    stock="GraniteForCausalLM",
    runtime="granite:Granite",
    above_zero=("logits_scaling",),
    # Neither system scales what Granite scales.
    megatron=None,
    torchtitan=None,
)
