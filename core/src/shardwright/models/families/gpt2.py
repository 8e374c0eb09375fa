"""GPT-2 (Radford et al. 2019)."""

from shardwright.models import traits
from shardwright.models.facts import Family
from shardwright.models.parameters import Parameters, conv1d, norm, vocabulary
from shardwright.models.traits import BLOCK, Config, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["n_inner"]
    if layer == EMBEDDING:
        yield from vocabulary("transformer.wte.weight", config)
        yield Parameter(name="transformer.wpe.weight", shape=(config["max_position_embeddings"], hidden))
    elif layer == HEAD:
        yield from norm("transformer.ln_f", hidden)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from norm("ln_1", hidden)
        yield Parameter(name="attn.c_attn.weight", shape=(hidden, 3, hidden), tp_dim=2)
        yield Parameter(name="attn.c_attn.bias", shape=(3, hidden), tp_dim=1)
        yield from conv1d("attn.c_proj", hidden, hidden, "rows")
        yield from norm("ln_2", hidden)
        yield from conv1d("mlp.c_fc", inner, hidden, "columns")
        yield from conv1d("mlp.c_proj", hidden, inner, "rows")


GPT2 = Family(
    model_type="gpt2",
    stock=traits.StockModel(
        "GPT2LMHeadModel",
        tied=(("transformer.wte.weight", "lm_head.weight"),),
        places={BLOCK: "transformer.h.{}"},
        outputs_last=True,
    ),
    runtime="bert:GPT2",
    keys=traits.Keys(
        {
            **{"activation_function": "gelu_new", "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5},
            **{"resid_pdrop": 0.1, "tie_word_embeddings": True},
        },
        lengths=("vocab_size", "max_position_embeddings"),
        aliases={
            **{"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
            "max_position_embeddings": "n_positions",
        },
        implied=lambda config: {"n_inner": config.get("n_inner") or 4 * config["hidden_size"]},
        ignored=("n_ctx",),
        only={
            "add_cross_attention": Only(False, "there is one stack"),
            "reorder_and_upcast_attn": Only(False, "the kernels have a fixed order of operations"),
        },
    ),
    parameters=_parameters,
    stacks=(Stack("n_layer"),),
    divided=traits.Divided(("n_head", "n_inner")),
    attention=traits.AttentionFacts(traits.Mask.CAUSAL, "learned_absolute"),
    norm=traits.Norm("LayerNorm", "layer_norm_epsilon", ends=()),
    feed_forward=lambda config: traits.FeedForward(config["activation_function"], gated=False),
    dropouts=traits.Dropouts("attn_pdrop", "resid_pdrop", embedding="embd_pdrop", ends=("full", "attention", "mlp")),
    systems=traits.Systems("alone"),
)
# models/auto/configuration_auto.py of transformers 5.23 assigns it the configuration of GPT-2.
GPT_SW3 = traits.OtherName("gpt-sw3", "gpt2")
