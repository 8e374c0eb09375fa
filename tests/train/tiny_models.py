"""A tiny model of each family, and the stock model it must train like."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from baichuan_reference import BaichuanConfig, BaichuanForCausalLM
from file_forms import as_in_files
from mtp_reference import with_mtp_modules
from stock_experts import with_balance
from tiny_decoders import DECODERS, GROUPED, LAYERS
from tiny_multi_modal import MULTI_MODAL, logits_of_images
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from shardwright.models.mtp import mtp_layers
from shardwright.types import Model, Plan
from shardwright_train.data.share import Batch
from shardwright_train.engine.engine import Engine, build_engine
from shardwright_train.engine.learning_rate import ANY, Hyperparameters
from shardwright_train.models.as_stock import AsStock
from shardwright_train.models.base import describe, family_named, family_of
from shardwright_train.models.initial_weights import fill
from shardwright_train.parallel.data import default_dtype
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext

T = TypeVar("T")
SEQUENCE_LENGTH = 16

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        **GROUPED,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        **GROUPED,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    **DECODERS,
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": LAYERS,
        "n_head": 8,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 59,
        "mask_token_id": 60,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
    **{
        name: {
            "model_type": name,
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "max_position_embeddings": 64,
            "pad_token_id": 5,
            "mask_token_id": 60,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        }
        for name in ("roberta", "xlm-roberta")
    },
    "modernbert": {
        "model_type": "modernbert",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "global_attn_every_n_layers": 2,
        "local_attention": 6,
        "local_rope_theta": 100.0,
        "pad_token_id": 59,
        "mask_token_id": 60,
        **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id")),
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 4,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 8,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "decoder_start_token_id": 3,
    },
    "siglip": {
        "model_type": "siglip",
        "num_labels": 5,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "image_size": 16,
            "patch_size": 4,
        },
    },
    "whisper": {
        "model_type": "whisper",
        "vocab_size": 61,
        "d_model": 32,
        "num_mel_bins": 6,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "max_source_positions": 20,
        "max_target_positions": 32,
        "decoder_start_token_id": 3,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 5),
    },
    **MULTI_MODAL,
    "vit": {
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "image_size": [12, 20],
        "patch_size": 4,
        "num_labels": 5,
    },
    "swin": {
        "model_type": "swin",
        **{"embed_dim": 32, "mlp_ratio": 1.5, "depths": [2, 2], "num_heads": [4, 8], "drop_path_rate": 0.0},
        **{"image_size": 16, "patch_size": 4, "window_size": 2, "num_labels": 5},
    },
    "glm4": {
        "model_type": "glm4",
        **GROUPED,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 60,
    },
    "granite": {
        "model_type": "granite",
        **GROUPED,
        "max_position_embeddings": 64,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.7,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "mixtral": {
        "model_type": "mixtral",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
        "initializer_range": 0.3,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0],
        "router_aux_loss_coef": 0.5,
        "initializer_range": 0.3,
    },
}


def tiny(family: str, **changes: Any) -> Model:
    """The tiny model of a family, with changes to its configuration."""
    config = CONFIGS[family] | changes
    return describe(family_named(family, "test"), config, f"tiny-{family}", SEQUENCE_LENGTH)


def stock_model(model: Model, attention: str | None = None) -> nn.Module:
    """The stock model of a description."""
    family = family_of(model, "test")
    config = family.configuration(model)
    if isinstance(family, AsStock):
        config._experts_implementation = "eager"
        traced: nn.Module = family.stock(config)
        for parameter in (p for p in traced.parameters() if p.is_floating_point()):
            parameter.data = parameter.data.to(torch.get_default_dtype())  # some classes have float32 for some
        return traced
    if model.family == "baichuan":
        return BaichuanForCausalLM(BaichuanConfig(**model.config, **family.facts.counted(model.layers, model.config)))
    # Stock gpt-oss has sinks in the eager kernel alone.
    config._attn_implementation = "eager" if family.facts.attention.sinks else attention or family.plain_kernel
    stock: nn.Module = family.stock(config)
    return with_balance(with_mtp_modules(stock, model) if mtp_layers(model.layers) else stock)


def named_parameters(stock: nn.Module, model: Model) -> dict[str, nn.Parameter]:
    """The parameters of a stock model, each once; tied ones under the embedding's name, wherever the head stands."""
    tied = {second for _, second in model.tied}
    distinct: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in stock.named_parameters(remove_duplicate=False):
        if name not in tied:
            distinct.setdefault(id(parameter), (name, parameter))
    return dict(distinct.values())


def initial_stock(model: Model, dtype: torch.dtype | None = None) -> nn.Module:
    """The stock model with the weights of seed 0, rounded to a format, as transformers reads files in it."""
    family = family_of(model, "test")
    with default_dtype(dtype or torch.get_default_dtype()):
        stock = stock_model(model)
    state: dict[str, Tensor] = {}
    for layer in ("embedding", *(f"layers[{i}]" for i in range(len(model.layers))), "head"):
        for local, values in initial_layer(model, layer).items():
            state.setdefault(family.hugging_face_name(model, layer, local), values)
    named, state = named_parameters(stock, model), as_in_files(family, state)
    assert set(named) <= set(state), set(named) - set(state)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    return stock


def initial_layer(model: Model, layer: str, seed: int = 0) -> dict[str, Tensor]:
    """The initial weights of a layer, whole, by their names in it."""
    family = family_of(model, "test")
    with torch.device("meta"):
        module = family.build(model, layer)
    found = {name: torch.empty(x.shape) for name, x in module.named_parameters()}
    for name, fillings in family.fillings(model, layer).items():
        shape = found[name].shape
        box = [(0, length) for length in shape]
        fill(found[name], fillings, shape, box, seed, family.full_name(model, layer, name))
    return found


def stock_logits(stock: nn.Module, batch: Batch) -> Tensor:
    """Logits whose last dim is classes, in the order of the batch's labels; each document of a sample by itself."""
    if "documents" in batch:
        return torch.stack([_logits_of_documents(stock, batch, sample) for sample in range(len(batch["documents"]))])
    match stock:
        case T5ForConditionalGeneration():
            # Stock makes the decoder's tokens from the labels itself.
            logits = stock(batch["tokens"], labels=batch["labels"].contiguous()).logits
        case _ if "input_features" in batch:
            features = batch["input_features"].to(stock.dtype)
            logits = stock(features, decoder_input_ids=batch["decoder_tokens"]).logits
        case _ if "pixel_values" in batch and "tokens" in batch:
            logits = logits_of_images(stock, batch)
        case _ if "pixel_values" in batch:
            logits = stock(batch["pixel_values"].to(stock.dtype)).logits[:, None]
        case _:
            logits = stock(batch["tokens"], attention_mask=batch.get("attention_mask")).logits
    return logits


def _logits_of_documents(stock: nn.Module, batch: Batch, sample: int) -> Tensor:
    """Of one sample."""
    lengths = batch["documents"][sample].unique_consecutive(return_counts=True)[1].tolist()
    names = [name for name in ("tokens", "attention_mask") if name in batch]
    parts = zip(*(batch[name][sample, None].split(lengths, 1) for name in names), strict=True)
    return torch.cat([stock_logits(stock, dict(zip(names, part, strict=True)))[0] for part in parts])


def batch_of(model: Model, samples: int, seed: int) -> Batch:
    """A batch of random inputs."""
    generator = torch.Generator().manual_seed(seed)
    return family_of(model, "test").learns(model).random_batch(samples, generator)


def engine_of(
    plan: Plan,
    world: World,
    groups: Groups,
    attention: str | None = None,
    settings: Hyperparameters = ANY,
    updates: int = 0,
) -> Engine:
    """This rank's part of a plan, with the weights of seed 0."""
    family = family_of(plan.model, "plan")
    context = RankContext(
        plan=plan,
        family=family,
        rank=world.rank,
        groups=groups,
        attention=attention or family.plain_kernel,
        device=world.device,
        seed=0,
    )
    return build_engine(context, settings, updates)


def made_by_first(world: World, make: Callable[..., T], *arguments: object) -> T:
    """What rank 0 makes, on all ranks of a test: anything that can be pickled."""
    made = [make(*arguments) if world.rank == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return made[0]  # type: ignore[return-value]
