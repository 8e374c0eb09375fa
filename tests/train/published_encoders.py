"""config.json of encoders of text as they are published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def roberta(layers: int, width: int, heads: int, **more: Any) -> Config:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    dropout = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.1)
    kind = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_act": "gelu"}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "vocab_size": 50265}
    numbers = {"initializer_range": 0.02, "layer_norm_eps": 1e-05, "type_vocab_size": 1}
    lengths = {"intermediate_size": 4 * width, "max_position_embeddings": 514}
    return shape | dropout | kind | tokens | numbers | lengths | more


def xlm_roberta(*shape: int) -> Config:
    kind = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], "vocab_size": 250002}
    return roberta(*shape) | kind | {"output_past": True, "position_embedding_type": "absolute"}


def modernbert(layers: int, width: int, heads: int, **more: Any) -> Config:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    dropout = dict.fromkeys(("attention_dropout", "classifier_dropout", "embedding_dropout", "mlp_dropout"), 0.0)
    biases = dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), False)
    kind = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "decoder_bias": True}
    activations = {"classifier_activation": "gelu", "classifier_pooling": "mean", "hidden_activation": "gelu"}
    tokens = {"bos_token_id": 50281, "cls_token_id": 50281, "eos_token_id": 50282, "sep_token_id": 50282}
    rotary = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "max_position_embeddings": 8192}
    window = {"global_attn_every_n_layers": 3, "local_attention": 128, "deterministic_flash_attn": False}
    numbers = {"initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "layer_norm_eps": 1e-05, "norm_eps": 1e-05}
    rest = {"pad_token_id": 50283, "vocab_size": 50368, "position_embedding_type": "absolute", "torch_dtype": "float32"}
    tied = {"tie_word_embeddings": True, "gradient_checkpointing": False}
    return shape | dropout | biases | kind | activations | tokens | rotary | window | numbers | rest | tied | more


ENCODERS: dict[str, tuple[Config, int, int]] = {
    "roberta-base": (roberta(12, 768, 12), 512, 124_697_433),
    "roberta-large": (roberta(24, 1024, 16), 512, 355_412_057),
    "xlm-roberta-base": (xlm_roberta(12, 768, 12), 512, 278_295_186),
    "ModernBERT-base": (modernbert(22, 768, 12, intermediate_size=1152), 1024, 149_655_232),
    "ModernBERT-large": (modernbert(28, 1024, 16, intermediate_size=2624), 1024, 395_881_664),
    "xlm-roberta-large": (xlm_roberta(24, 1024, 16), 512, 560_142_482),
}
"""config.json, a length to train with, and the published number of parameters."""

REFUSED_ENCODERS: list[tuple[Config, int, str]] = [
    (
        ENCODERS["roberta-base"][0],
        513,
        "sequence length 513 is over 512 positions (max_position_embeddings 514, of which tokens have none of",
    ),
    (ENCODERS["roberta-base"][0] | {"pad_token_id": None}, 64, "pad_token_id null cannot be trained"),
    (ENCODERS["ModernBERT-base"][0] | {"mlp_dropout": 0.1}, 64, "mlp_dropout 0.1 cannot be trained: blocks drop"),
    (
        ENCODERS["ModernBERT-base"][0] | {"layer_types": ["sliding_attention"] * 22},
        64,
        "layer_types 'sliding_attention' cannot be the type of the first block",
    ),
    (ENCODERS["roberta-base"][0] | {"is_decoder": True}, 64, "is_decoder true cannot be trained"),
]
