"""A family is two files, which nothing lists: docs/add-a-model.md links to one, and a new one is found."""

from pathlib import Path

import pytest

from shardwright.models import families, registry
from shardwright.models.description import model_of_config
from shardwright_train import models
from shardwright_train.models.base import describe, family_named

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
FACTS = '''"""Seed-OSS (ByteDance 2025): Llama with biases of queries, keys and values."""

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, grouped_attention, with_blocks
from shardwright.models.parameters import Parameters, gated, norm
from shardwright.models.traits import Config, Systems


def _block(_layer: str, config: Config) -> Parameters:
    biased = {**config, "attention_bias": config["attention_out_bias"]}
    yield from grouped_attention(biased, input_biases=config["attention_bias"])
    yield from gated("mlp", config["hidden_size"], config["intermediate_size"], config["mlp_bias"])
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    stock=LLAMA.stock._replace(name="SeedOssForCausalLM"),
    runtime="seed_oss:SeedOss",
    keys=LLAMA.keys._replace(
        defaults={**LLAMA.keys.defaults, "attention_bias": True, "attention_out_bias": False, "head_dim": 128}
    ),
    parameters=with_blocks(_block),
    systems=Systems(),
)
'''
RUNTIME = '''"""Seed-OSS (ByteDance 2025)."""

from shardwright_train.models.llama import Llama


class SeedOss(Llama):
    """Llama by another name."""
'''
CONFIG = {
    **{"model_type": "seed_oss", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64},
}


def test_the_page_links_the_files_of_a_family() -> None:
    for file in ("core/src/shardwright/models/families/olmo2.py", "stages/train/src/shardwright_train/models/olmo2.py"):
        assert f"](../{file})" in PAGE.read_text()
        assert (PAGE.parents[1] / file).is_file()


def test_two_new_files_add_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, text in ((families, FACTS), (models, RUNTIME)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "seed_oss.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    assert registry.FAMILIES.keys() == registry.read_families().keys() - {"seed_oss"}
    monkeypatch.setitem(registry.FAMILIES, "seed_oss", registry.read_families()["seed_oss"])
    described = model_of_config(CONFIG, "seed", 16, "config.json")
    assert described.layers == ("block",) * 3 and len(described.types["block"].parameters) == 12
    # The stock model has the same parameters, by the runtime file's modules.
    assert describe(family_named("seed_oss", "config.json"), CONFIG, "seed", 16) == described
