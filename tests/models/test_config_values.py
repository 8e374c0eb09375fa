"""Whatever value a key of a config.json has, `advise` and `describe` describe the model or refuse it in one line."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from random_configurations import length_of, random_configuration

from shardwright.io import BadInput
from shardwright.models.config_keys import PARTS, read_keys, without_notes
from shardwright.models.description import model_of_config
from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES
from shardwright_train.models.base import describe, family_named

TRAINED = [name for name, facts in FAMILIES.items() if facts.untrained is None]
HOSTILE: tuple[Any, ...] = (None, True, 0, -1, 10**400, 1e308, 0.5, float("nan"), "", "8", [], [1, 2], [None], {"a": 1})
RARER: tuple[Any, ...] = (False, 3, 2**31, float("inf"), "x", [0] * 20_000, [10**400], [[]], [{}], {}, {"type": []})
DRAWS, MANY_DRAWS = 4, 40
"""Descriptions of stock models of each family, which are slower."""
_READ = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
_FURTHER = ("rope_scaling", "rope_parameters", "sliding_window", "id2label", "num_experts_per_tok", "pad_token_id")


def _read_keys(family: Family) -> list[str]:
    """Return the keys that a family's facts read."""
    typed = (key for stack in family.stacks for key in stack.typing_keys)
    named = (*family.keys.aliases, *family.keys.aliases.values(), *family.counts, *typed, *PARTS, *_READ, *_FURTHER)
    return sorted({*family.keys.defaults, *family.keys.lengths, *family.divided.lengths, *named})


def _all_keys(family: Family) -> list[str]:
    return sorted(
        {*_read_keys(family), *family.keys.ignored, *family.keys.only, *read_keys().families[family.model_type]}
    )


def _mutated(config: dict[str, Any], keys: list[str], values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield a configuration with each value of each key, at its top and inside of its parts."""
    for key in keys:
        for value in values:
            yield config | {key: value}
            for part in PARTS:
                if isinstance(inner := config.get(part), dict) and key not in PARTS:
                    yield config | {part: inner | {key: value}}


def _is_one_line(error: Exception) -> bool:
    return 0 < len(str(error)) < 1500 and "\n" not in str(error)


def _advised(config: dict[str, Any], length: int | None) -> bool:
    try:
        model_of_config(config, "m", length, "config.json")
    except BadInput as error:
        assert _is_one_line(error)
        return False
    return True


def _described(family: Family, config: dict[str, Any], length: int) -> bool:
    try:
        describe(family_named(family.model_type, "tests"), without_notes(family, config)[0], "m", length)
    except ValueError as error:
        assert _is_one_line(BadInput("config.json", str(error), "correct it"))
        return False
    return True


def _small(name: str) -> tuple[dict[str, Any], int]:
    config, _ = random_configuration(name, random.Random(name))
    return config, length_of(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_a_key_that_facts_read_is_described_or_refused_in_one_line(name: str) -> None:
    config, length = _small(name)
    assert _advised(config, length)
    results = [_advised(each, length) for each in _mutated(config, _read_keys(FAMILIES[name]), HOSTILE)]
    assert 0 < sum(results) < len(results)


@pytest.mark.parametrize("name", TRAINED)
def test_describe_refuses_values_in_one_line_too(name: str) -> None:
    _check_described(name, DRAWS)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_any_value_of_any_key_is_described_or_refused_in_one_line(name: str) -> None:
    config, length = _small(name)
    for each in _mutated(config, _all_keys(FAMILIES[name]), RARER):
        _advised(each, length)
    _check_described(name, MANY_DRAWS)


def _check_described(name: str, draws: int) -> None:
    config, length = _small(name)
    mutated = list(_mutated(config, _read_keys(FAMILIES[name]), HOSTILE + RARER))
    for each in random.Random(name).sample(mutated, draws):
        _described(FAMILIES[name], each, length)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("phi3", {"resid_pdrop": None}, "resid_pdrop is null"),
        ("gemma3_text", {"attention_bias": None}, "attention_bias is null"),
        ("modernbert", {"local_attention": None}, "local_attention is null"),
        ("t5", {"feed_forward_proj": None}, "feed_forward_proj is null"),
        ("t5", {"num_hidden_layers": None}, "num_hidden_layers is null"),
        ("whisper", {"dropout": None}, "dropout is null"),
        ("whisper", {"encoder_attention_heads": 0}, "encoder_attention_heads must be a whole number from 1"),
        ("deepseek_v2", {"qk_nope_head_dim": None}, "qk_nope_head_dim is null"),
        ("gemma3", {"text_config": "x"}, "text_config 'x' is not an object"),
        ("llava", {"vision_config": [1]}, "vision_config [1] is not an object"),
        ("phi3", {"num_key_value_heads": -1}, "num_key_value_heads must be a whole number from 1"),
        ("swin", {"embed_dim": 10**400}, "embed_dim must be a number up to 1e+15, not 1000"),
        ("swin", {"mlp_ratio": float("inf")}, "mlp_ratio must be a number up to 1e+15, not inf"),
        ("llama", {"max_position_embeddings": "64"}, "max_position_embeddings must be a whole number from 1"),
    ],
)
def test_both_name_the_key_whose_value_cannot_be_used(name: str, change: dict[str, Any], said: str) -> None:
    config, length = _small(name)
    with pytest.raises(BadInput) as advised:
        model_of_config(config | change, "m", length, "config.json")
    with pytest.raises(ValueError) as described:
        describe(family_named(name, "tests"), config | change, "m", length)
    assert said in str(advised.value) and said in str(described.value)
    assert str(advised.value) == f"config.json: {described.value}: correct the configuration"


@pytest.mark.parametrize(
    ("name", "keys"),
    [("swin", ("hidden_size", "num_layers")), ("t5", ("num_decoder_layers",)), ("llama", ("head_dim",))],
)
def test_null_stands_for_a_key_that_follows_from_others(name: str, keys: tuple[str, ...]) -> None:
    config, length = _small(name)
    given = {key: value for key, value in config.items() if key not in keys}
    for key in keys:
        whole = model_of_config(given, "m", length, "config.json")
        nulled = model_of_config(given | {key: None}, "m", length, "config.json")
        assert nulled.types == whole.types and nulled.layers == whole.layers
