"""Llama (Touvron et al. 2023); Mistral, Qwen2 and Qwen3 differ by their stock classes alone."""

from shardwright_models.facts import BLOCK, FULL, SLIDING
from shardwright_train.models.base import Family
from shardwright_train.parallel.sharding_rules import Parts


class Llama(Family):
    """The Llama family, sharded by transformers' own tensor-parallel plan, and by vocabulary."""

    embedding = ("model.embed_tokens",)
    head = ("model.norm", "lm_head")
    parts = dict.fromkeys((BLOCK, SLIDING, FULL), Parts("model.layers", attention=("self_attn",), mlp=("mlp",)))
    plan = {"embed_tokens": "embedding_rowwise"}
    rotary = "model.rotary_emb"
