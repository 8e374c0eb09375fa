"""docs/formats.md lists every kind of file, with its version."""

from pathlib import Path

import pytest

from shardwright.schema.generate import DOCUMENTS
from shardwright.types.hardware_profile import HardwareProfile
from shardwright.types.model_profile import ModelProfile
from shardwright_search.space.request import SearchRequest

PAGE = (Path(__file__).parents[2] / "docs/formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*DOCUMENTS, SearchRequest, HardwareProfile, ModelProfile])
def test_the_page_lists_every_format_with_its_version(kind):
    assert f"| `{kind.FORMAT}` {kind.VERSION} |" in PAGE


def test_a_schema_describes_every_value_of_an_enumeration():
    schema = (Path(__file__).parents[2] / "core/schemas/plan.schema.json").read_text(encoding="utf-8")
    assert "flash_attention_2: The flash-attn package" in schema and "zero3: " in schema
