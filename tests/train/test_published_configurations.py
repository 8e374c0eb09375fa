"""Configurations as they are published on the Hub are described as they are; what cannot be trained is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_calls import call
from published_audio import AUDIO, REFUSED_AUDIO
from published_decoders import DECODERS, REFUSED_DECODERS
from published_encoders import ENCODERS, REFUSED_ENCODERS
from published_latents import LATENTS, REFUSED_LATENTS
from published_windowed import REFUSED_WINDOWED, WINDOWED

from shardwright.io import read_document
from shardwright.models.registry import FAMILIES
from shardwright.types import Model
from shardwright_train.cli import APP

Config = dict[str, Any]


def llama(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    shape = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    known = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "model_type": "llama", "hidden_act": "silu"}
    common = {"initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache": True, "torch_dtype": "bfloat16"}
    return shape | known | common | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False} | more


def llama_2(*shape: int) -> Config:
    older = {"_name_or_path": "meta-llama/Llama-2-7b-hf", "transformers_version": "4.31.0.dev0", "vocab_size": 32000}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": None}
    return llama(*shape, max_position_embeddings=4096) | older | tokens


def llama_3(*shape: int, **more: Any) -> Config:
    tokens = {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 8192}
    newer = {"attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1, "rope_theta": 500000.0}
    return llama(*shape, rope_scaling=None) | tokens | newer | {"transformers_version": "4.40.0.dev0"} | more


def llama_3_1(*shape: int, factor: float = 8.0, **more: Any) -> Config:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = {"rope_scaling": bands | {"factor": factor, "rope_type": "llama3"}, "max_position_embeddings": 131072}
    return llama_3(*shape, mlp_bias=False, **scaled) | {"transformers_version": "4.43.0.dev0"} | more


def mistral(**more: Any) -> Config:
    shape = llama(4096, 14336, 32, 32, 8, model_type="mistral", architectures=["MistralForCausalLM"], vocab_size=32000)
    return (
        shape | {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "rope_theta": 10000.0} | more
    )


def olmo_2(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False}
    tokens = {"vocab_size": 100352, "bos_token_id": 100257, "eos_token_id": 100257, "pad_token_id": 100277}
    numbers = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "rope_scaling": None}
    return llama(*shape) | kind | tokens | numbers | more


def qwen2(*shape: int, vocab: int, windowed: int, **more: Any) -> Config:
    tokens = {"vocab_size": vocab, "bos_token_id": 151643, "eos_token_id": 151643, "max_position_embeddings": 131072}
    window = {"max_window_layers": windowed, "sliding_window": 131072, "use_sliding_window": False}
    kind = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-06, "rope_theta": 1e6}
    return llama(*shape, attention_dropout=0.0) | tokens | window | kind | more


def qwen3(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "rope_scaling": None}
    window = {"sliding_window": None, "attention_bias": False, "max_position_embeddings": 40960}
    return qwen2(*shape, vocab=151936, windowed=shape[2]) | kind | window | more


def mixtral(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    return mistral() | llama(*shape, rope_theta=1e6, sliding_window=None) | kind | experts | more


def qwen3_moe(*shape: int, inner: int, **more: Any) -> Config:
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": inner}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "output_router_logits": False}
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
    return qwen3(*shape) | kind | experts | layers | more


def gpt2(layers: int, width: int, heads: int, **more: Any) -> Config:
    task = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.1)
    summary = {"summary_type": "cls_index", "summary_use_proj": True, "summary_proj_to_labels": True}
    shape = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_ctx": 1024, "n_positions": 1024}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    numbers = {"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "vocab_size": 50257, "summary_activation": None}
    return task | dropout | summary | shape | kind | numbers | {"bos_token_id": 50256, "eos_token_id": 50256} | more


def bert(layers: int, width: int, heads: int, **more: Any) -> Config:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    dropout = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "gradient_checkpointing": False}
    kind = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_act": "gelu", "use_cache": True}
    numbers = {"initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0, "type_vocab_size": 2}
    lengths = {"intermediate_size": 4 * width, "max_position_embeddings": 512, "vocab_size": 30522}
    return shape | dropout | kind | numbers | lengths | {"position_embedding_type": "absolute"} | more


def t5(layers: int, width: int, feed_forward: int, heads: int, **more: Any) -> Config:
    shape = {"num_layers": layers, "d_model": width, "d_ff": feed_forward, "d_kv": 64, "num_heads": heads}
    task = {"task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}}}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": 32128}
    numbers = {"dropout_rate": 0.1, "initializer_factor": 1.0, "layer_norm_epsilon": 1e-06}
    kind = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    return shape | task | tokens | numbers | kind | {"relative_attention_num_buckets": 32, "output_past": True} | more


def t5_1_1(*shape: int) -> Config:
    config = t5(*shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=shape[0])
    del config["task_specific_params"]
    return config


def vit(layers: int, width: int, heads: int, **more: Any) -> Config:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    image = {"image_size": 224, "patch_size": 16, "num_channels": 3, "encoder_stride": 16, "qkv_bias": True}
    dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "hidden_act": "gelu"}
    kind = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "torch_dtype": "float32"}
    names = {str(number): f"class {number}" for number in range(1000)}
    numbers = {"initializer_range": 0.02, "intermediate_size": 4 * width, "layer_norm_eps": 1e-12}
    classes = {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    return shape | image | dropout | kind | numbers | classes | more


PUBLISHED: dict[str, tuple[Config, int, int]] = {
    "Llama-2-7b": (llama_2(4096, 11008, 32, 32, 32), 4096, 6_738_415_616),
    "Llama-2-13b": (
        # Files that were published with code name it: it is not run.
        llama_2(5120, 13824, 40, 40, 40) | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        4096,
        13_015_864_320,
    ),
    "Llama-2-70b": (llama_2(8192, 28672, 80, 64, 8), 4096, 68_976_648_192),
    "Llama-3-8B": (llama_3(4096, 14336, 32, 32, 8), 8192, 8_030_261_248),
    "Llama-3-70B": (llama_3(8192, 28672, 80, 64, 8), 8192, 70_553_706_496),
    "Llama-3.1-8B": (llama_3_1(4096, 14336, 32, 32, 8), 16384, 8_030_261_248),
    "Llama-3.1-405B": (llama_3_1(16384, 53248, 126, 128, 8), 8192, 405_853_388_800),
    "Llama-3.2-1B": (
        llama_3_1(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
        8192,
        1_235_814_400,
    ),
    "Llama-3.2-3B": (
        llama_3_1(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, tie_word_embeddings=True),
        8192,
        3_212_749_824,
    ),
    "Mistral-7B-v0.1": (mistral(sliding_window=4096), 4096, 7_241_732_096),
    "Mistral-7B-v0.1 beyond its window": (mistral(sliding_window=4096), 8192, 7_241_732_096),
    "Mistral-7B-v0.3": (mistral(sliding_window=None, vocab_size=32768, rope_theta=1e6), 8192, 7_248_023_552),
    "Qwen2-0.5B": (
        qwen2(896, 4864, 24, 14, 2, vocab=151936, windowed=24, tie_word_embeddings=True),
        4096,
        494_032_768,
    ),
    "Qwen2-7B": (qwen2(3584, 18944, 28, 28, 4, vocab=152064, windowed=28), 4096, 7_615_616_512),
    "Qwen2-7B, some blocks with a window": (
        qwen2(3584, 18944, 28, 28, 4, vocab=152064, windowed=20, use_sliding_window=True, sliding_window=2048),
        4096,
        7_615_616_512,
    ),
    "Qwen2.5-1.5B": (
        qwen2(1536, 8960, 28, 12, 2, vocab=151936, windowed=28, tie_word_embeddings=True, use_mrope=False),
        4096,
        1_543_714_304,
    ),
    "Qwen2.5-14B": (qwen2(5120, 13824, 48, 40, 8, vocab=152064, windowed=48), 4096, 14_770_033_664),
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True), 4096, 596_049_920),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, 8, layer_types=["full_attention"] * 36), 4096, 8_190_735_360),
    "Mixtral-8x7B-v0.1": (mixtral(4096, 14336, 32, 32, 8, router_aux_loss_coef=0.02), 4096, 46_702_792_704),
    "Mixtral-8x22B-v0.1": (mixtral(6144, 16384, 56, 48, 8), 4096, 140_620_634_112),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 6144, 48, 32, 4, inner=768), 4096, 30_532_122_624),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 12288, 94, 64, 4, inner=1536), 4096, 235_093_634_560),
    "OLMo-2-1124-7B": (olmo_2(4096, 11008, 32, 32, 32), 4096, 7_298_617_344),
    "OLMo-2-1124-13B": (olmo_2(5120, 13824, 40, 40, 40), 4096, 13_716_198_400),
    "gpt2": (gpt2(12, 768, 12), 1024, 124_439_808),
    "gpt2-medium": (gpt2(24, 1024, 16, n_special=0, predict_special_tokens=True), 1024, 354_823_168),
    "gpt2-large": (gpt2(36, 1280, 20, n_special=0, predict_special_tokens=True), 1024, 774_030_080),
    "gpt2-xl": (gpt2(48, 1600, 25, output_past=True), 1024, 1_557_611_200),
    "bert-base-uncased": (bert(12, 768, 12), 512, 109_514_298),
    "bert-large-uncased": (bert(24, 1024, 16), 512, 335_174_458),
    **AUDIO,
    **DECODERS,
    **ENCODERS,
    **LATENTS,
    **WINDOWED,
    "t5-small": (t5(6, 512, 2048, 8, n_positions=512), 512, 60_506_624),
    "t5-base": (t5(12, 768, 3072, 12, n_positions=512), 512, 222_903_552),
    # Published with a head of its own, 512 x 32128 more: transformers has tied it to the token table since version 5.
    "t5-v1_1-small": (t5_1_1(8, 512, 1024, 6), 512, 76_961_152 - 512 * 32128),
    "t5-v1_1-base": (t5_1_1(12, 768, 2048, 12), 512, 247_577_856 - 768 * 32128),
    "vit-base-patch16-224": (vit(12, 768, 12), 197, 86_567_656),
    "vit-large-patch16-224": (vit(24, 1024, 16), 197, 304_326_632),
}
"""config.json, a length to train with, and the published number of parameters."""


def describe(folder: Path, config: Config, sequence_length: int) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--name", "x", "--sequence-length", str(sequence_length), "--out", str(folder / "model.json")]
    ended = call(APP, "describe", str(folder), *options)
    return ended.exit_code, ended.stderr


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_described_as_it_is(tmp_path: Path, name: str) -> None:
    config, sequence_length, parameters = PUBLISHED[name]
    code, said = describe(tmp_path, config, sequence_length)
    further = config.get("num_nextn_predict_layers", 0)
    left_out = f"layers that predict further tokens are left out (--mtp {further} adds them)\n"
    assert code == 0 and (said.endswith(left_out) and said.count("\n") == 1 if further else not said)
    model = read_document(tmp_path / "model.json", Model)
    assert model.parameter_count == parameters
    # Neither names of classes or code, nor what says a second time how many layers there are.
    assert not {"auto_map", "id2label", "label2id", "layer_types", "transformers.js_config"} & set(model.config)
    # What a description keeps is a configuration again, of as many layers as it lists.
    kept = model.config | FAMILIES[model.family].counted(model.layers, model.config)
    assert describe(tmp_path, kept, sequence_length) == (0, said)
    assert read_document(tmp_path / "model.json", Model) == model


LENGTH = "must be a whole number from 1"
SCALED = {"original_max_position_embeddings": 4096, "factor": 2.0}
REFUSED: list[tuple[Config, int, str]] = [
    (PUBLISHED["Mistral-7B-v0.1"][0] | {"sliding_window": 0}, 8192, f"sliding_window {LENGTH}"),
    (
        PUBLISHED["Qwen2-7B"][0] | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 4},
        4096,
        f"sliding_window {LENGTH}",
    ),
    (PUBLISHED["Qwen2-7B"][0] | {"use_mrope": True}, 4096, "use_mrope true cannot be trained: positions count tokens"),
    (
        PUBLISHED["Qwen3-0.6B"][0] | {"layer_types": ["full_attention"] * 27 + ["linear_attention"]},
        4096,
        "layer_types 'linear_attention' is not one of sliding_attention, full_attention",
    ),
    (PUBLISHED["Llama-3-8B"][0] | {"rope_scaling": {"type": "su"} | SCALED}, 4096, "rope_type 'su' cannot be trained"),
    (
        PUBLISHED["Llama-3-8B"][0] | {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}},
        4096,
        "rope_parameters: 'mrope_section' cannot be trained",
    ),
    (PUBLISHED["Llama-3-8B"][0] | {"partial_rotary_factor": 0.5}, 4096, "unknown key 'partial_rotary_factor'"),
    (
        PUBLISHED["Llama-3-8B"][0] | {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        4096,
        "rope_parameters: 'partial_rotary_factor' cannot be trained",
    ),
    (PUBLISHED["Llama-3-8B"][0] | {"pad_token_id": 128256}, 4096, "pad_token_id 128256 is not below vocab_size 128256"),
    (PUBLISHED["Llama-3-8B"][0], 16384, "sequence length 16384 is over 8192 positions"),
    (PUBLISHED["Mixtral-8x7B-v0.1"][0] | {"router_jitter_noise": 0.1}, 64, "router_jitter_noise 0.1 cannot be trained"),
    (PUBLISHED["Qwen3-30B-A3B"][0] | {"num_experts_per_tok": 200}, 64, "num_experts_per_tok 200 is over num_local_ex"),
    (PUBLISHED["gpt2"][0] | {"reorder_and_upcast_attn": True}, 64, "reorder_and_upcast_attn true cannot be trained"),
    (
        PUBLISHED["bert-base-uncased"][0] | {"position_embedding_type": "relative_key"},
        512,
        'position_embedding_type "relative_key" cannot be trained: transformers has no others',
    ),
    (PUBLISHED["t5-small"][0] | {"tie_encoder_decoder": True}, 512, "tie_encoder_decoder true cannot be trained"),
    (
        PUBLISHED["vit-base-patch16-224"][0] | {"problem_type": "multi_label_classification"},
        197,
        'problem_type "multi_label_classification" cannot be trained',
    ),
    (
        PUBLISHED["gpt2"][0] | {"vocab_size": 10**12},
        1024,
        f"vocab_size {LENGTH}",
    ),
    (PUBLISHED["gpt2"][0] | {"n_layer": 10**9}, 1024, "n_layer must be 4096 or less"),
    (PUBLISHED["gpt2"][0] | {"n_layer": 0}, 1024, f"n_layer {LENGTH}"),
    (
        PUBLISHED["gpt2"][0] | {"n_embd": 2**30 * 12, "n_head": 12},
        1024,
        f"n_embd {LENGTH}",
    ),
    (PUBLISHED["gpt2"][0] | {"n_embd": "wide"}, 1024, f"n_embd {LENGTH}"),
    (
        PUBLISHED["Llama-2-7b"][0] | {"num_attention_heads": 30},
        1024,
        "4096) is not a multiple of the number of attention heads (30)",
    ),
    (
        PUBLISHED["Llama-2-7b"][0] | {"num_attention_heads": 0},
        1024,
        f"num_attention_heads {LENGTH}",
    ),
    (
        PUBLISHED["Llama-2-7b"][0] | {"hidden_size": -4096},
        1024,
        f"hidden_size {LENGTH}",
    ),
    (PUBLISHED["Llama-2-7b"][0] | {"hidden_act": "sillu"}, 1024, "sillu"),
    *REFUSED_AUDIO,
    *REFUSED_DECODERS,
    *REFUSED_ENCODERS,
    *REFUSED_LATENTS,
    *REFUSED_WINDOWED,
]


@pytest.mark.parametrize(("config", "sequence_length", "words"), REFUSED, ids=[words[:40] for _, _, words in REFUSED])
def test_what_cannot_be_trained_is_named_in_one_line(
    tmp_path: Path, config: Config, sequence_length: int, words: str
) -> None:
    status, err = describe(tmp_path, config, sequence_length)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("error: ") and words in err
    assert not (tmp_path / "model.json").exists()
