"""Facts that no description holds are those of the stock models, and no family is without one of them."""

import msgspec
import pytest
import torch
from msgspec.structs import fields, replace
from torch import nn
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from shardwright.models.description import model_of_config
from shardwright.models.facts import Family, Vision
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import (
    AttentionFacts,
    Divided,
    Dropouts,
    FeedForward,
    Keys,
    Mask,
    Norm,
    Stack,
    StockModel,
)
from shardwright.types import EMBEDDING, HEAD
from shardwright_train.models.base import describe, family_named
from shardwright_train.models.llama import Llama
from shardwright_train.parallel.sharding_rules import Parts

NAMES = sorted(name for name, facts in FAMILIES.items() if facts.untrained is None)
NEEDED = {
    "model_type", "stock", "runtime", "keys", "parameters", "stacks", "divided", "attention", "norm", "feed_forward",
    "dropouts",
}  # fmt: skip
NEEDED_OF_TRAITS = {
    StockModel: {"name", "tied"},
    Keys: {"defaults", "lengths"},
    Divided: {"lengths"},
    AttentionFacts: {"mask", "positions"},
    Norm: {"kind", "epsilon", "ends"},
    FeedForward: {"activation", "gated"},
    Dropouts: {"attention", "hidden"},
    Vision: {"positions"},
}


NEEDED_KEYS = {
    "baichuan": {"max_position_embeddings": 64},
    "llava": {"image_token_index": 5},
    "gemma3": {"mm_tokens_per_image": 196},
    "mistral3": {"vision_config": {}},
}
"""Keys without which a file says too little."""


@pytest.fixture(scope="module", params=NAMES)
def stock(request):
    """A family's facts, its runtime, and its stock model with two blocks in each stack on the meta device."""
    facts, runtime = FAMILIES[request.param], family_named(request.param, "test")
    config = runtime.configured(counted(facts, 2) | NEEDED_KEYS.get(request.param, {}))
    with torch.device("meta"):
        return facts, runtime, runtime.stock(config)


def counted(facts, blocks):
    """Keys that say so many blocks of each type, and of a pyramid in each stage."""
    each = [name for stack in facts.stacks for name in stack.types for _ in range(blocks)]
    return dict.fromkeys(facts.counts, blocks) if not facts.merging else facts.counted(each, {})


def _kinds(model, part):
    return {type(module).__name__: module for module in model.modules() if part in type(module).__name__}


def test_a_family_that_lacks_a_fact_cannot_be_made():
    assert {field.name for field in fields(Family) if field.required} == NEEDED
    for name in NEEDED:
        known = {key: value for key, value in msgspec.structs.asdict(FAMILIES["llama"]).items() if key != name}
        with pytest.raises(TypeError, match=f"Missing required argument '{name}'"):
            Family(**known)
    needed = {trait: set(trait._fields) - trait._field_defaults.keys() for trait in NEEDED_OF_TRAITS}
    assert needed == NEEDED_OF_TRAITS


def test_blocks_have_the_same_paths_in_facts_and_runtime():
    for name, facts in ((name, FAMILIES[name]) for name in NAMES):
        paths = {kind: parts.place("{}") for kind, parts in family_named(name, "test").parts.items()}
        named = {kind for stack in facts.stacks for kind in stack.types}
        assert {kind: facts.stock.places.get(kind, "model.layers.{}") for kind in named} == {k: paths[k] for k in named}


def test_keys_mean_what_transformers_says(stock):
    facts, runtime, model = stock
    assert facts.keys.aliases == runtime.stock.config_class.attribute_map
    # A key that the class does not have is one that another class of the same facts has.
    default = runtime.stock.config_class()
    said = {key: getattr(default, key) for key in facts.keys.defaults if hasattr(default, key)}
    # One number for height and width.
    pairs = {key for key in said.keys() & {"image_size", "patch_size"} if isinstance(facts.keys.defaults[key], tuple)}
    said |= {key: (said[key],) * 2 for key in pairs}
    assert {key: facts.keys.defaults[key] for key in said} == said
    assert set(facts.dropouts.keys) <= set(model.config.to_dict())
    assert facts.norm.epsilon is None or hasattr(model.config, facts.norm.epsilon)


def test_attention_sees_what_the_stock_model_lets_it_see(stock):
    facts, runtime, model = stock
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    # Decoders are causal beside encoders, whatever the mask is that both have.
    both = {True, False} if len(facts.stacks) > 1 else {False}
    if facts.joined_by is None:
        assert causal == {Mask.CAUSAL: {True}}.get(facts.attention.mask, both)
    else:
        assert causal == both and facts.attention.mask is Mask.CAUSAL
        tower = facts.stacks[0].types[0]
        assert facts.of_type(tower, facts.configured({})).attention.mask is Mask.NONE
    assert (runtime.rotary is not None) == (facts.attention.positions == "rope")


def test_norms_and_bounds_are_those_of_a_stock_block(stock):
    facts, runtime, model = stock
    block = runtime.module(model, next(iter(runtime.parts)), 0)
    norms = [name for name, part in block.named_modules() if "Norm" in type(part).__name__ and "final" not in name]
    of_heads = [name for name in norms if name.endswith(("q_norm", "k_norm", "_a_layernorm"))]
    assert len(norms) - len(of_heads) == (1 if facts.norm.shared else 2) * facts.norm.of_part
    assert facts.attention.soft_caps == (getattr(model.config, "attn_logit_softcapping", None) is not None)


@pytest.mark.parametrize(("name", "activation"), [*((name, None) for name in NAMES), ("t5", "gated-gelu")])
def test_feed_forward_parts_have_the_stock_models_activation_and_gate(name, activation):
    facts, runtime = FAMILIES[name], family_named(name, "test")
    given = counted(facts, 1) | ({} if activation is None else {"feed_forward_proj": activation})
    given |= {facts.experts.first: 0} if facts.experts and facts.experts.first else {}
    with torch.device("meta"):
        config = runtime.configured(given | NEEDED_KEYS.get(name, {}))
        block = runtime.module(runtime.skeleton(config), next(iter(runtime.parts)), 0)
    function, gated = facts.feed_forward(facts.configured(given))
    # gpt-oss has no module for what it makes of a sigmoid.
    assert name == "gpt_oss" or type(ACT2FN[function]) in {type(module) for module in block.modules()}
    router = facts.experts and facts.experts.router
    parts = [part for name, part in block.named_modules() if name != router]
    matrices = [part for part in parts if isinstance(part, nn.Linear | Conv1D)]
    # Stock matrices may hold several side by side: queries, keys and values, and those of a gated part.
    attention = {"gpt2": 2, "modernbert": 1, "deepseek_v2": 5, "deepseek_v3": 5}.get(name, 4)
    assert len(matrices) - attention == (0 if facts.experts and not facts.experts.shared else 3 if gated else 2)
    if facts.experts:
        experts = block.get_submodule(f"{runtime.part}.experts")
        first, last = experts.gate_up_proj, experts.down_proj
        assert first.numel() == (2 if gated else 1) * last.numel()


def test_tied_parameters_are_those_of_the_stock_model(stock):
    facts, runtime, model = stock
    ends = {EMBEDDING: runtime.embedding, HEAD: runtime.head}
    tied = {(own, other) for other, own in (model._tied_weights_keys or {}).items()}
    within = {
        pair
        for pair in tied
        if all(name.startswith(tuple(f"{path}." for path in ends[end])) for name, end in zip(pair, ends, strict=True))
    }
    assert set(facts.stock.tied) == within


def test_samples_have_the_labels_of_the_objective(stock):
    facts, runtime, model = stock
    read = facts.configured(vars(model.config))
    length = facts.fixed_positions(read) or max(32, facts.least_positions(read))
    objective = runtime.objective.from_config(model.config, length)
    without_input = 0 if facts.vision is None else facts.vision.without_input
    assert (facts.labels or length, without_input) == (objective.labels, objective.no_inputs)


@pytest.mark.parametrize("layers", [("sparse",), ("dense",), ("dense", "sparse"), ("sparse", "sparse", "dense")])
def test_a_description_of_other_layers_has_these_in_its_stock_model(layers):
    """Probes have some layers of each type, wherever the configuration's rules put them."""
    config = {"model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = replace(model_of_config(config, "m", 16, "config.json"), layers=layers)
    stock = family_named("qwen3_moe", "test").stock_model(model)
    assert ["sparse" if hasattr(layer.mlp, "experts") else "dense" for layer in stock.model.layers] == list(layers)


def test_blocks_of_one_list_may_have_several_types(monkeypatch):
    """A made-up family whose blocks alternate as the configuration says, on Llama's stock model."""
    stack = Stack(types=("local", "global"), type_at=lambda config, index: config["pattern"][index])
    made_up = replace(FAMILIES["llama"], stacks=(stack,), keys=FAMILIES["llama"].keys._replace(ignored=("pattern",)))
    monkeypatch.setitem(FAMILIES, "llama", made_up)

    class MadeUp(Llama):
        parts = dict.fromkeys(stack.types, Parts("model.layers", attention=("self_attn",), mlp=("mlp",)))

        def configured(self, config):
            parsed = super().configured({key: value for key, value in config.items() if key != "pattern"})
            parsed.pattern = config["pattern"]
            return parsed

    pattern = ["local", "local", "global", "local"]
    config = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "pattern": pattern}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    by_shapes = model_of_config(config, "m", 16, "config.json")
    assert by_shapes.layers == tuple(pattern) and set(by_shapes.types) == {"embedding", "local", "global", "head"}
    family = MadeUp(made_up, LlamaForCausalLM)
    assert describe(family, config, "m", 16) == by_shapes
    names = {name for name, _ in family.stock_model(by_shapes).named_parameters()}
    assert set(family.stock_names(by_shapes)) == names
    assert family.full_name(by_shapes, "layers[3]", "mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
