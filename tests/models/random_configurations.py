"""Small configurations of every family, drawn at random."""

from shardwright.models.registry import FAMILIES

__all__ = ["length_of", "random_configuration"]


def random_configuration(name, rng):
    """A small configuration of a family, with keys left out at random, and a length of samples."""
    heads, size, inner = rng.choice((1, 2, 4, 6)), rng.choice((2, 4, 6)), rng.randint(3, 40)
    shape = {"hidden_size": heads * size, "num_attention_heads": heads}
    numbers = {"vocab_size": rng.randint(8, 99), "intermediate_size": inner, "num_hidden_layers": rng.randint(1, 4)}
    match name:
        case "gpt2":
            usual = shape | {"num_hidden_layers": rng.randint(1, 4)}
            config = {rng.choice((key, FAMILIES[name].keys.aliases[key])): value for key, value in usual.items()}
            config |= {"vocab_size": numbers["vocab_size"], "n_positions": 64}
            further = {"n_inner": inner, "resid_pdrop": 0.0, "tie_word_embeddings": False}
        case "bert" | "roberta" | "xlm-roberta":
            config = shape | numbers | {"max_position_embeddings": 66}
            further = {"type_vocab_size": 3, "hidden_dropout_prob": 0.0, "hidden_act": "gelu_new"}
        case "whisper":
            stacks = {"attention_heads": heads, "ffn_dim": inner, "layers": rng.randint(1, 4)}
            config = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in stacks.items()}
            config |= {"d_model": heads * size, "vocab_size": numbers["vocab_size"], "decoder_start_token_id": 1}
            config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 2)
            further = {"num_mel_bins": 5, "decoder_ffn_dim": 7, "decoder_layers": 3, "max_source_positions": 40}
            further |= {"decoder_attention_heads": 1, "dropout": 0.1, "max_target_positions": 70}
        case "siglip":
            del numbers["vocab_size"]
            vision = shape | numbers | {"image_size": 32, "patch_size": 4}
            config = {"vision_config": vision | rng.choice(({}, {"num_channels": 1}))}
            further = {"num_labels": 5, "text_config": {"hidden_size": 64}}
        case "llava":
            text = {key: numbers[key] for key in numbers if key != "vocab_size"} | shape | {"vocab_size": 99}
            vision = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_hidden_layers": rng.randint(2, 4)}
            vision |= {"intermediate_size": inner, "image_size": 16, "patch_size": 4}
            kind = rng.choice((None, "clip_vision_model", "siglip_vision_model"))
            vision |= {} if kind is None else {"model_type": kind}
            text |= rng.choice(({}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1}))
            config = {"text_config": text, "vision_config": vision, "image_token_index": 98}
            config |= {"vision_feature_select_strategy": "full"} if kind == "siglip_vision_model" else {}
            further = {"vision_feature_layer": rng.choice((-1, 1, 2)), "multimodal_projector_bias": False}
            further |= {"tie_word_embeddings": True, "images_per_sample": rng.randint(1, 3)}
        case "gemma3":
            text = {key: numbers[key] for key in numbers if key != "vocab_size"} | shape | {"vocab_size": 99}
            vision = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_hidden_layers": rng.randint(1, 4)}
            vision |= {"intermediate_size": inner, "image_size": 16, "patch_size": 4}
            text |= {"num_key_value_heads": 1, "sliding_window": rng.randint(4, 40), "layer_types": None}
            text |= rng.choice(({}, {"attention_bias": True}, {"head_dim": 8}, {"sliding_window_pattern": 2}))
            config = {"text_config": text, "vision_config": vision, "image_token_index": 98}
            config |= {"mm_tokens_per_image": rng.choice((1, 4, 16))}
            further = {"boi_token_index": 3, "tie_word_embeddings": True, "images_per_sample": rng.randint(1, 3)}
        case "mistral3" | "llama4" | "qwen3_vl" | "glm4v":
            text = {key: numbers[key] for key in numbers if key != "vocab_size"} | shape | {"vocab_size": 99}
            text |= {"num_key_value_heads": 1} | ({} if name == "glm4v" else {"head_dim": 8})
            vision = {"hidden_size": 8 * heads, "intermediate_size": inner, "patch_size": 4}
            stacked = {"num_attention_heads": heads, "num_hidden_layers": rng.randint(1, 4)}
            named = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
            further = {"images_per_sample": rng.randint(1, 2), "tie_word_embeddings": False}
            if name in ("qwen3_vl", "glm4v"):
                vision |= {named[key]: value for key, value in stacked.items()} | {"out_hidden_size": 12}
                further |= {"image_token_id": 5, "pixels_per_side": 8}
            else:
                vision |= stacked
                further |= {"image_token_index": 98}
            if name == "mistral3":
                text |= {"sliding_window": rng.choice((None, 64))}
                further |= {"pixels_per_side": 8, "multimodal_projector_bias": True, "spatial_merge_size": 1}
                vision["model_type"] = "pixtral"
            vision |= {"num_position_embeddings": 16} if name == "qwen3_vl" else {"image_size": 16}
            text |= {"num_local_experts": 4, "intermediate_size_mlp": inner} if name == "llama4" else {}
            config = {"text_config": text, "vision_config": vision}
        case "modernbert":
            config = shape | numbers | {"pad_token_id": None, "global_attn_every_n_layers": rng.randint(1, 4)}
            further = dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), True)
            further |= {"decoder_bias": False, "local_attention": rng.randint(0, 20), "embedding_dropout": 0.1}
        case "t5":
            config = {"d_model": heads * size, "num_heads": heads, "d_ff": inner, "num_layers": rng.randint(1, 4)}
            config |= {"vocab_size": numbers["vocab_size"]}
            further = {"d_kv": size + 1, "num_decoder_layers": rng.randint(1, 4), "dropout_rate": 0.0}
            further |= {"relative_attention_num_buckets": 8, "tie_word_embeddings": False}
            further |= {"feed_forward_proj": rng.choice(("gated-gelu", "gated-silu", "gelu"))}
        case "vit":
            del numbers["vocab_size"]
            config = shape | numbers | {"image_size": 32, "patch_size": 4}
            further = {"num_channels": 1, "num_labels": 5, "qkv_bias": False, "hidden_dropout_prob": 0.1}
            further |= {"id2label": {str(i): f"c{i}" for i in range(5)}}
        case "swin":
            stages = rng.randint(1, 4)
            config = {"embed_dim": 4 * heads, "depths": [rng.randint(1, 3) for _ in range(stages)], "window_size": 2}
            config |= {"num_heads": [heads * rng.choice((1, 2)) for _ in range(stages)], "image_size": 64}
            further = {"num_channels": 1, "num_labels": 5, "qkv_bias": False, "mlp_ratio": 1.5}
            further |= {"hidden_dropout_prob": 0.1, "use_absolute_embeddings": True, "patch_size": 2}
        case "baichuan":
            config = shape | numbers | {rng.choice(("model_max_length", "max_position_embeddings")): 64}
            further = {"z_loss_weight": 0, "tie_word_embeddings": False}
        case "deepseek_v2" | "deepseek_v3":
            groups, of_group = rng.randint(1, 3), rng.randint(2, 4)
            config = shape | numbers | {"moe_intermediate_size": rng.randint(3, 40), "n_shared_experts": 2}
            config |= {"n_routed_experts": groups * of_group, "num_experts_per_tok": rng.randint(1, of_group)}
            config |= {"n_group": groups, "topk_group": 1, "topk_method": "group_limited_greedy", "kv_lora_rank": 5}
            config |= {} if name == "deepseek_v2" else {"topk_method": "noaux_tc", "num_key_value_heads": heads}
            further = {"q_lora_rank": rng.choice((None, 7)), "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
            further |= {"v_head_dim": rng.choice((3, 10)), "attention_bias": True, "first_k_dense_replace": 2}
            further |= {"num_key_value_heads": heads, "tie_word_embeddings": True, "aux_loss_alpha": 0.1}
        case _:
            key_value_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
            config = shape | numbers | {"num_key_value_heads": key_value_heads}
            if name in ("gpt_oss", "llama4_text", "mixtral", "qwen3_moe"):
                config |= {"num_local_experts": rng.randint(4, 9), "num_experts_per_tok": rng.randint(1, 4)}
            if name == "qwen3_moe":
                config |= {"moe_intermediate_size": rng.randint(3, 40), "decoder_sparse_step": rng.randint(1, 3)}
                config |= {"mlp_only_layers": rng.choice(([], [0], [1, 2], None))}
            if name == "smollm3":
                rotated = [rng.randint(0, 1) for _ in range(config["num_hidden_layers"])]
                config |= {"pad_token_id": None, "no_rope_layer_interval": rng.randint(1, 3)}
                config |= {"no_rope_layers": rng.choice((rotated, None))}
            further = (
                {}
                if name in ("granite", "olmo2", "phi3", "qwen2", "smollm3", "cohere", "cohere2")
                else {"head_dim": size + 2}
            )
            further |= {"tie_word_embeddings": True, "max_position_embeddings": 64}
            further |= {"attention_bias": False, "sliding_window": 20} if name == "gpt_oss" else {}
            if name == "llama4_text":
                config |= {"intermediate_size_mlp": rng.randint(3, 40), "no_rope_layer_interval": rng.randint(1, 3)}
                config |= {"moe_layers": rng.choice(([], [0], [1, 2], None))}
                further |= {"interleave_moe_layer_step": 2, "attention_bias": True, "use_qk_norm": False}
            biases = dict.fromkeys(("granite", "llama", "smollm3"), ("attention_bias", "mlp_bias"))
            biases |= dict.fromkeys(
                ("cohere", "cohere2", "gemma2", "gemma3_text", "glm4", "olmo2", "qwen3"), ("attention_bias",)
            )
            further |= dict.fromkeys(biases.get(name, ()), True)
            config |= {"pad_token_id": 0} if name in ("glm4", "phi3") else {}
    config |= {key: value for key, value in further.items() if rng.random() < 0.5}
    config = {"model_type": name} | config
    family = FAMILIES[name]
    least = family.least_positions(family.configured(config))
    return config, length_of(config) if family.labels else rng.randint(least, 64)


def length_of(config):
    """The positions of an image, or some of a text."""
    family = FAMILIES[config["model_type"]]
    configured = family.configured(config)
    return family.fixed_positions(configured) or max(32, family.least_positions(configured))
