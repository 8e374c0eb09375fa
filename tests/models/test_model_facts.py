"""Descriptions by the facts of families are those that `shardwright train describe` reads off the stock models."""

import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from random_configurations import length_of, random_configuration

from shardwright.io import BadInput, read_document
from shardwright.models.description import model_of_config
from shardwright.models.registry import FAMILIES, read_presets
from shardwright.models.traits import FULL, SLIDING
from shardwright.plan.communication import Cause, context_messages, region_messages, tensors_of
from shardwright.plan.schedules.passes import Pass
from shardwright.types import LayerStrategy, Model, SequenceParallel
from shardwright.types.plan import misfit
from shardwright_train.commands.documents import describe_folder
from shardwright_train.models.base import describe, family_named

RANDOM = 8
ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "tests" / "frozen" / "committed" / "models").glob("*.json"))
LAYERS = {"gpt2": {"block": "n_layer"}, "t5": {"encoder": "num_layers", "decoder": "num_decoder_layers"}}
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {key: TINY[key] for key in TINY if key != "vocab_size"}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2}
T5 = {"model_type": "t5", "vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 4, "num_layers": 2}
VIT = {
    "model_type": "vit",
    **IMAGE,
    "image_size": 32,
    "patch_size": 4,
}
SWIN = {
    "model_type": "swin",
    "embed_dim": 24,
    "depths": [2, 3],
    "num_heads": [2, 4],
    "image_size": 32,
    "window_size": 4,
}
VARIANTS = {
    "llama-grouped": {"model_type": "llama", **TINY, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biased": {"model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "sliding_window": None},
    "mistral-windowed": {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "sliding_window": 24},
    "mistral-defaults": {"model_type": "mistral", **TINY, "num_attention_heads": 8},
    "qwen2": {"model_type": "qwen2", **TINY, "num_key_value_heads": 2, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "head_dim": 24, "layer_types": None},
    "qwen3-defaults": {"model_type": "qwen3", **TINY, "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", **TINY, "num_key_value_heads": 2, "num_local_experts": 5},
    "mixtral-defaults": {"model_type": "mixtral", **TINY, "num_attention_heads": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", **TINY, "num_experts": 6, "num_experts_per_tok": 3}
    | {"mlp_only_layers": [1]},
    "qwen3-moe-defaults": {"model_type": "qwen3_moe", **TINY},
    "olmo2": {"model_type": "olmo2", **TINY, "num_key_value_heads": 2, "attention_bias": True},
    "gemma2": {"model_type": "gemma2", **TINY, "num_key_value_heads": 2, "head_dim": 24, "hidden_act": "gelu"},
    "gemma2-windowed": {"model_type": "gemma2", **TINY, "num_hidden_layers": 3, "sliding_window": 8},
    "qwen2-windowed": {"model_type": "qwen2", **TINY, "num_hidden_layers": 4, "num_key_value_heads": 2}
    | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3-listed": {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "use_sliding_window": True}
    | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3": {"model_type": "gemma3_text", **TINY, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 24}
    | {"sliding_window": 8, "sliding_window_pattern": 2, "rope_local_base_freq": 500.0},
    "cohere": {"model_type": "cohere", **TINY, "num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True},
    "cohere-defaults": {"model_type": "cohere", **TINY, "tie_word_embeddings": False},
    "cohere2": {"model_type": "cohere2", **TINY, "num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 24}
    | {"sliding_window": 8, "sliding_window_pattern": 3},
    "deepseek-v2": {"model_type": "deepseek_v2", **TINY, "q_lora_rank": None, "num_experts_per_tok": 3}
    | {"first_k_dense_replace": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "scoring_func": "softmax"},
    "deepseek-v2-grouped": {"model_type": "deepseek_v2", **TINY, "num_experts_per_tok": 2, "n_routed_experts": 12}
    | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1, "v_head_dim": 192},
    "deepseek-v3": {"model_type": "deepseek_v3", **TINY, "num_key_value_heads": 4, "n_routed_experts": 12}
    | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 5, "first_k_dense_replace": 1, "attention_bias": True},
    "deepseek-v3-defaults": {"model_type": "deepseek_v3", **TINY, "num_key_value_heads": 4},
    "gemma2-defaults": {"model_type": "gemma2", **TINY},
    "glm4": {"model_type": "glm4", **TINY, "num_key_value_heads": 2, "head_dim": 24, "pad_token_id": 0},
    "glm4-defaults": {"model_type": "glm4", **TINY, "attention_bias": False, "pad_token_id": 0},
    "granite": {"model_type": "granite", **TINY, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "granite-scaled": {"model_type": "granite", **TINY, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "ministral": {"model_type": "ministral", **TINY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {"model_type": "ministral3", **TINY, "num_key_value_heads": 2, "head_dim": 16},
    "ministral3-defaults": {"model_type": "ministral3", "num_hidden_layers": 2},
    "phi3": {"model_type": "phi3", **TINY, "num_key_value_heads": 2, "sliding_window": 20, "pad_token_id": 0},
    "phi3-defaults": {"model_type": "phi3", **TINY, "pad_token_id": 0, "resid_pdrop": 0.1, "mlp_bias": False},
    "smollm3": {"model_type": "smollm3", **TINY, "pad_token_id": 5, "no_rope_layers": [0, 1]},
    "smollm3-defaults": {"model_type": "smollm3", **TINY, "pad_token_id": None, "num_hidden_layers": 9},
    "gpt2": GPT2,
    "gpt2-usual-names": {"model_type": "gpt2", "vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 32}
    | {"num_attention_heads": 4, "num_hidden_layers": 3},
    "gpt2-narrow": GPT2 | {"n_inner": 48, "tie_word_embeddings": False},
    "gpt2-no-dropout": GPT2 | {"resid_pdrop": 0.0},
    "baichuan-rotated": {"model_type": "baichuan", **TINY, "max_position_embeddings": 64},
    "baichuan-sloped": {"model_type": "baichuan", **TINY, "model_max_length": 64, "z_loss_weight": 0},
    "bert": {"model_type": "bert", **TINY, "max_position_embeddings": 64},
    "roberta": {"model_type": "roberta", **TINY, "max_position_embeddings": 34},
    "xlm-roberta": {"model_type": "xlm-roberta", **TINY, "max_position_embeddings": 36, "pad_token_id": 3},
    "siglip": {"model_type": "siglip", "architectures": ["SiglipModel"], "initializer_factor": 1.0}
    | {"text_config": {"model_type": "siglip_text_model", "hidden_size": 48, "num_attention_heads": 4}}
    | {"vision_config": {"model_type": "siglip_vision_model", "patch_size": 8, "image_size": 32, **IMAGE}},
    "siglip-defaults": {"model_type": "siglip", "id2label": {"0": "a", "1": "b", "2": "c"}},
    "llava": {"model_type": "llava", "text_config": TINY, "vision_config": {**IMAGE, "image_size": 32, "patch_size": 8}}
    | {"image_token_index": 90, "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100},
    "gemma3-images": {"model_type": "gemma3", "image_token_index": 90, "mm_tokens_per_image": 4}
    | {"text_config": {"model_type": "gemma3_text", **TINY, "num_key_value_heads": 2, "sliding_window": 8}}
    | {"vision_config": {"model_type": "siglip_vision_model", **IMAGE, "image_size": 32, "patch_size": 8}},
    "mistral3": {"model_type": "mistral3", "image_token_index": 90, "pixels_per_side": 32, "images_per_sample": 2}
    | {"text_config": {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "head_dim": 8}}
    | {"vision_config": {"model_type": "pixtral", **IMAGE, "image_size": 1540, "patch_size": 8}},
    "llava-siglip": {"model_type": "llava", "text_config": {"model_type": "llama", **TINY}, "image_token_index": 90}
    | {"vision_config": {"model_type": "siglip_vision_model", **IMAGE, "image_size": 32, "patch_size": 8}}
    | {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "tie_word_embeddings": True},
    "llava-defaults": {"model_type": "llava", "image_token_index": 5, "vision_config": {}},
    "modernbert": {"model_type": "modernbert", **TINY, "num_hidden_layers": 5, "pad_token_id": 3},
    "modernbert-listed": {"model_type": "modernbert", **TINY, "pad_token_id": 3, "local_attention": 10}
    | {"layer_types": ["full_attention", "full_attention"], "norm_bias": True},
    "t5": T5,
    "t5-gated": T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False},
    "t5-no-dropout": T5 | {"dropout_rate": 0.0, "relative_attention_num_buckets": 8},
    "vit": VIT,
    "vit-classes": VIT | {"id2label": {str(i): f"c{i}" for i in range(7)}, "label2id": {f"c{i}": i for i in range(7)}},
    "swin": SWIN,
    "swin-defaults": {"model_type": "swin"},
    "swin-published-keys": SWIN
    | {"path_norm": True, "num_layers": 2, "hidden_size": 48, "id2label": {"0": "a", "1": "b"}, "encoder_stride": 32}
    | {"architectures": ["SwinForImageClassification"], "torch_dtype": "float32", "initializer_range": 0.02},
    "swin-oblong": SWIN | {"image_size": [32, 64], "patch_size": [2, 4], "use_absolute_embeddings": True},
    "vit-no-bias": VIT | {"qkv_bias": False, "hidden_dropout_prob": 0.1, "num_labels": 5},
}


def _published():
    for path in sorted((ROOT / "config" / "models").glob("*.yaml")):
        said = yaml.safe_load(path.read_text())
        if said["config"]["model_type"] in FAMILIES:
            yield pytest.param(said["config"], said["sequence_length"], id=path.stem)
    for name, preset in read_presets().items():
        yield pytest.param(dict(preset.config), preset.sequence_length, id=name)
    for name, config in VARIANTS.items():
        yield pytest.param(config, length_of(config), id=name)


@pytest.mark.parametrize(("config", "length"), tuple(_published()))
def test_shapes_are_what_describe_reads_off_the_stock_model(config, length, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_of_config(config, "m", length, "config.json") == describe_folder(tmp_path, "m", length)


@pytest.mark.parametrize("name", sorted(name for name, facts in FAMILIES.items() if facts.untrained is None))
def test_shapes_of_random_small_configurations_are_what_describe_reads_off_the_stock_model(name):
    family, rng = family_named(name, "test"), random.Random(name)
    for _ in range(RANDOM):
        config, length = random_configuration(name, rng)
        described = describe(family, config, "m", length)
        assert model_of_config(config, "m", length, "config.json") == described, config


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_shapes_are_those_of_every_committed_description(path):
    model = read_document(path, Model)
    keys = LAYERS.get(model.family, {"block": "num_hidden_layers"})
    config = model.config | {key: model.layers.count(kind) for kind, key in keys.items()}
    assert model_of_config(config, model.name, model.sequence_length, path) == model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model_type": "dbrx"},
            "model_type 'dbrx' is none of the families known here: the nearest is llama: --as llama",
        ),
        ({"model_type": "qwen2_5_vl"}, "model_type 'qwen2_5_vl' cannot be trained: mrope_section and window_size"),
        ({"model_type": "mixtral", "num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is over num_l"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts must be a whole number from 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers 1 is not a list of numbers of layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number from 1"),
        ({"hidden_size": 33, "num_attention_heads": 4}, "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ({"model_type": "gpt2", "n_embd": 33, "n_head": 4}, "n_embd 33 is not a multiple of n_head 4"),
        ({"model_type": "whisper", "d_model": 7}, "d_model 7 is not a multiple of encoder_attention_heads 4"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 is over"),
        ({"max_position_embeddings": 16}, "sequence length 32 is over 16 positions"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 16}, "over the sliding_window 16"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window must be a whole number from 1"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 1e308}},
            "factor of rope_scaling must be a number up to 1e+15, not 1e+308",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": "8"}},
            "factor of rope_parameters must be a number up to 1e+15, not '8'",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number up to 1e+15, not 'small'"),
        ({"mlp_bias": "yes"}, "mlp_bias must be true or false, not 'yes'"),
        ({"hidden_act": 1}, "hidden_act must be a string, not 1"),
        ({"model_type": "swin", "mlp_ratio": 1e308}, "mlp_ratio must be a number up to 1e+15, not 1e+308"),
    ],
)
def test_what_has_no_shapes_is_refused_in_one_line(change, said):
    with pytest.raises(BadInput) as refused:
        model_of_config({"model_type": "llama", **TINY, **change}, "m", 32, "config.json")
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("window", "kept"), [(24, 24), (31, 31), (32, None), (None, None)])
def test_a_window_shorter_than_samples_is_described_with_the_scores_that_it_leaves(window, kept):
    config = VARIANTS["mistral-windowed"] | {"sliding_window": window}
    model = model_of_config(config, "m", 32, "config.json")
    whole = model_of_config(config | {"sliding_window": None}, "m", 32, "config.json").types["block"]
    block = model.types["block"]
    assert block.window == kept
    # As many pairs as a causal mask leaves out are counted with those that it leaves.
    outside = 2 * sum(i - j >= window for i in range(32) for j in range(i + 1)) if window else 0
    diagonal = 32 - kept if kept else 0
    left_out = 4 * (outside - diagonal) * TINY["hidden_size"]
    assert block.forward_flops_per_sample == whole.forward_flops_per_sample - left_out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depths": 2}, "depths 2 is not a list of numbers, one for each stage"),
        ({"depths": [2, 0]}, "depths [2, 0] is not a list"),
        ({"num_heads": [2, 4, 8]}, "depths and num_heads list 2 and 3 stages"),
        ({"num_heads": [5, 4]}, "num_heads 5 of stage1 does not divide its 24 features"),
        ({"window_size": 3}, "window_size 3: the 8 x 8 patches of stage1 do not divide into windows"),
        ({"window_size": 8}, "window_size 8: the 4 x 4 patches of stage2 do not divide into windows"),
        ({"image_size": 28}, "window_size 4: the 7 x 7 patches of stage1"),
        ({"image_size": "large"}, "image_size must be a whole number from 1"),
        ({"mlp_ratio": 0}, "mlp_ratio 0 leaves no features"),
    ],
)
def test_a_pyramid_that_cannot_be_built_is_refused_in_one_line_by_both(change, said, tmp_path):
    config = SWIN | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as refused:
        model_of_config(config, "m", None, tmp_path / "config.json")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(BadInput) as refused:
        describe_folder(tmp_path, "m", 64)
    assert "config.json: " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "listed", "length", "layers"),
    [
        ("gemma2", None, 8, ["block"] * 3),
        ("gemma2", None, 9, [SLIDING, FULL, SLIDING]),
        # A list of its own could not be told from the rule's.
        ("gemma2", [FULL, FULL, SLIDING], 8, [FULL, FULL, SLIDING]),
        ("gemma2", [SLIDING, FULL, SLIDING], 8, ["block"] * 3),
        # Angles differ, too.
        ("gemma3_text", None, 8, [SLIDING, SLIDING, FULL]),
    ],
)
def test_blocks_whose_windows_hold_a_sample_are_alike_and_configured_as_they_were(name, listed, length, layers):
    config = {"model_type": name, **TINY, "num_hidden_layers": 3, "sliding_window": 8, "layer_types": listed}
    config |= {"sliding_window_pattern": 3} if name == "gemma3_text" else {}
    model, family = model_of_config(config, "m", length, "config.json"), family_named(name, "test")
    assert list(model.layers) == layers
    assert family.configuration(model).layer_types == family.configured(config).layer_types


def test_a_description_does_not_name_what_its_model_lacks():
    """Else plans of before would have another sum, and their runs would begin anew."""
    model = msgspec.to_builtins(model_of_config(read_presets()["llama-2-7b"].config, "llama", 1024, "a preset"))
    assert set(model) == {"name", "family", "config", "sequence_length", "layers", "tied", "types"}
    block = model["types"]["block"]
    lengths = {"tp_must_divide", "ulysses_must_divide", "labels"}
    assert set(block) == {"parameters", "outputs", "regions", "forward_flops_per_sample"} | lengths
    assert {key for p in block["parameters"] for key in p} == {"name", "shape", "tp_dim", "inside", "shared"}
    assert set(block["regions"][0]["attention"]) == {"queries", "keys", "heads", "kv_heads", "head_features"}


def test_shapes_need_no_torch():
    code = (
        "import sys, shardwright.models.description, shardwright.estimate.profile, shardwright.models.registry\n"
        "assert not {'torch', 'transformers', 'pandas', 'snakemake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_BILLIONS = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "llama-3.3-70b": 70.55, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09, "mixtral-8x7b": 46.70, "mixtral-8x22b": 140.62,
    "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "glm-4-9b": 9.40, "glm-4-32b": 32.57, "granite-3.0-8b": 8.17, "baichuan2-13b": 13.90,
    "command-r": 34.98, "command-r-plus": 103.81, "command-r7b": 8.03,
    "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01,
    "llava-1.5-7b": 7.063, "gemma-3-4b-images": 4.30,
    "swin-tiny": 0.0283, "swin-small": 0.0496, "swin-base": 0.0878, "swin-large": 0.1965,
}  # fmt: skip
"""Parameters in billions, as the pages of the published weights count them; tied matrices once."""


def test_presets_have_the_parameters_that_their_authors_publish() -> None:
    presets = read_presets()
    for name, billions in _BILLIONS.items():
        preset = presets[name]
        model = model_of_config(preset.config, name, preset.sequence_length, name)
        assert model.parameter_count / 1e9 == pytest.approx(billions, rel=4e-3), name


@pytest.mark.parametrize(("size", "products"), [("tiny", 4.5), ("small", 8.7), ("base", 15.4), ("large", 34.5)])
def test_swin_has_the_operations_that_its_authors_count(size, products):
    """Billions of multiply-adds in one pass of an image (Liu et al. 2021, table 1)."""
    preset = read_presets()[f"swin-{size}"]
    model = model_of_config(preset.config, size, None, size)
    operations = sum(model.types[name].forward_flops_per_sample for name in ("embedding", *model.layers, "head"))
    assert operations / 2e9 == pytest.approx(products, rel=0.01)


def test_value_heads_of_other_features_are_exchanged_by_themselves_and_gathered_with_keys():
    model = model_of_config(VARIANTS["deepseek-v3"], "m", 32, "config.json")
    ulysses = LayerStrategy(type="dense", tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.ULYSSES)
    messages = [m for m in region_messages(model, "dense", ulysses, 1, 2, 1) if m.cause is Cause.ULYSSES]
    heads = model.types["dense"].regions[0].attention
    widths = {heads.head_features, heads.features_of_values}
    assert len(widths) == 2 and {m.bytes for m in messages} == {2 * 32 * 4 * width // 2 for width in widths}
    assert sum(m.times for m in messages if m.during is Pass.FORWARD) == 4
    shared = LayerStrategy(type="dense", tp_size=1, dp_size=1, cp_size=2)
    assert misfit(model, "dense", shared) is None
    given = model.types["dense"], shared, 1, tensors_of(model, model.types["dense"])
    assert {m.bytes for m in context_messages(*given, 2, 2, 1)} == {2 * 32 * 4 * sum(widths)}
