"""config.json of models of audio as they are published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def whisper(width: int, layers: int, heads: int, **more: Any) -> Config:
    kind = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}
    shape = {"d_model": width, "num_hidden_layers": layers, "num_mel_bins": 80, "vocab_size": 51865}
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width, "layerdrop": 0.0}
    stacks = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in sizes.items()}
    dropout = dict.fromkeys(("activation_dropout", "attention_dropout", "dropout"), 0.0)
    tokens = {"bos_token_id": 50257, "eos_token_id": 50257, "pad_token_id": 50257, "decoder_start_token_id": 50258}
    made = {"begin_suppress_tokens": [220, 50257], "forced_decoder_ids": [[1, 50259], [2, 50359]], "max_length": 448}
    lengths = {"max_source_positions": 1500, "max_target_positions": 448, "scale_embedding": False, "init_std": 0.02}
    augment = {"apply_spec_augment": False, "mask_time_prob": 0.05, "mask_feature_length": 10, "mask_time_length": 10}
    rest = {"activation_function": "gelu", "torch_dtype": "float32", "use_cache": True, "median_filter_width": 7}
    return kind | shape | stacks | dropout | tokens | made | lengths | augment | rest | more


AUDIO: dict[str, tuple[Config, int, int]] = {
    "whisper-tiny": (whisper(384, 4, 6), 448, 37_760_640),
    "whisper-base": (whisper(512, 6, 8), 448, 72_593_920),
    "whisper-small": (whisper(768, 12, 12), 448, 241_734_912),
    "whisper-large-v3": (whisper(1280, 32, 20, num_mel_bins=128, vocab_size=51866), 448, 1_543_490_560),
}
"""config.json, a length of text to train with, and the published number of parameters."""

REFUSED_AUDIO: list[tuple[Config, int, str]] = [
    (AUDIO["whisper-tiny"][0], 449, "sequence length 449 is over 448 positions"),
    (AUDIO["whisper-tiny"][0] | {"encoder_layerdrop": 0.1}, 64, "encoder_layerdrop 0.1 cannot be trained: no block"),
    (AUDIO["whisper-tiny"][0] | {"apply_spec_augment": True}, 64, "apply_spec_augment true cannot be trained: inputs"),
    (AUDIO["whisper-tiny"][0] | {"decoder_start_token_id": 60000}, 64, "decoder_start_token_id 60000 is not below"),
]
