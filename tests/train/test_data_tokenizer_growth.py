"""Tokenizers whose rules would fill the memory, or end the library, are refused before they run."""

import json
import random
import struct
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_calls import call
from tokenizers import Tokenizer, models

from shardwright.io import BadInput
from shardwright_train.cli import APP
from shardwright_train.data.tokenizer import growth, library_faults, read_tokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SQUEEZE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
LOWER = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _chain(*rules: Mapping[str, Any], inner: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", inner: [*rules]}


def _precompiled(index: bytes, *texts: str) -> dict[str, str]:
    table = struct.pack("<I", len(index)) + index + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()}


def _described(normalizer: object, pre_tokenizer: object = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str())
    return made | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


def _write(folder: Path, described: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


TEN = _replace("a", "a" * 100)
HOLES = {"type": "BPE", "vocab": {"a": 0, "</s>": 100_000_000}, "merges": []}
HOSTILE = {
    "chain": (_described(_chain(*[TEN] * 6)), "can make 1e+12 characters of one, over 48"),
    "nested": (_described(_chain(_chain(TEN), _chain(_chain(TEN, TEN)))), "can make 1e+06 characters"),
    "relay": (_described(_chain(*(_replace(a, 9 * b) for a, b in ("ab", "bc", "cd")))), "can make 729 characters"),
    "regex": (_described(_chain(*[_replace(".", "xxxx", "Regex")] * 4)), "characters of one"),
    "between": (_described(_chain(*[_replace("x*", "y", "Regex")] * 8)), "can make 256 characters"),
    "decomposed": (_described(_chain(_replace(" ", "\ufdfa" * 4), {"type": "NFKD"})), "can make 72 characters"),
    "prepended": (_described({"type": "Prepend", "prepend": "x" * 100}), "can make 101 characters"),
    "bytes": (_described(None, _chain(*[BYTE_LEVEL] * 8, inner="pretokenizers")), "characters of one"),
    "precompiled": (_described(_precompiled(b"\0" * 4, "y" * 100)), "can make 100 characters"),
    "long": (_described(_replace("a", "b" * 20_000)), "has a Replace with a text of 20000 characters"),
    "many": (_described(_chain(*[{"type": "NFC"}] * 300)), "has 300 normalizers and pre-tokenizers, over 256"),
    "empty": (_described(_replace("", "x")), "has a Replace whose pattern is empty: give the text"),
    "empty_regex": (_described(_replace("", "x", "Regex")), "has a Replace whose pattern is empty"),
    "no_length": (_described(None, {"type": "FixedLength", "length": 0}), "has a FixedLength of 0"),
    "holes": (_described(None) | {"model": HOLES}, "numbers its 2 tokens up to 100000000: 99999999 have none"),
    "damaged": (_described(_precompiled(b"\0" * 4, "abc")), "tokenizer.json: cannot encode a text (index out of bound"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_would_fill_the_memory_or_end_the_library_is_one_line(name: str, tmp_path: Path) -> None:
    described, words = HOSTILE[name]
    model = _write(tmp_path / "model", described)
    (tmp_path / "d.txt").write_text("a b a\n")
    ended = call(APP, "prepare", "--text", tmp_path / "d.txt", "--tokenizer", model, "--out", tmp_path / "out")
    assert ended.exit_code == 2 and words in ended.stderr
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_token_that_is_normalized_while_the_file_is_read_fills_nothing(tmp_path: Path) -> None:
    token = {"id": 2, "content": "aa", "single_word": False, "lstrip": False, "rstrip": False, "special": False}
    described = HOSTILE["chain"][0] | {"added_tokens": [token | {"normalized": True}]}
    with pytest.raises(BadInput, match="can make 1e\\+12 characters"):
        read_tokenizer(_write(tmp_path / "model", described) / "tokenizer.json")


@pytest.mark.parametrize(
    "described",
    [
        _described(_chain(_precompiled(b"\0" * 4, "y" * 18), {"type": "Strip"}, SQUEEZE), META),
        _described(LOWER, {"type": "BertPreTokenizer"}),
        _described(
            _chain(*(_replace(*pair) for pair in (("①", "1"), ("㌔", "キロ"), ("``", '"'))), {"type": "NFKC"}),
            BYTE_LEVEL,
        ),
        _described(_chain({"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁"))),
        _described(_chain({"type": "NFKC"}, {"type": "Lowercase"}, *[SQUEEZE] * 6), BYTE_LEVEL),
    ],
)
def test_rules_of_published_tokenizers_are_taken(described: dict[str, Any]) -> None:
    assert growth(described) <= 48


def test_no_text_grows_more_than_the_bound() -> None:
    """Property: random chains on random texts of the characters that they name."""
    draw = random.Random(0)
    some, grown = [*"ab ﬁﷺİé中"], 0

    def word(longest: int) -> str:
        return "".join(draw.choices(some, k=draw.randint(1, longest)))

    for _ in range(300):
        kinds = [
            _replace(word(2), word(5)), _replace(draw.choice(("a", "b*", "[ab]", "(?=a)", "a|")), word(3), "Regex"),
            {"type": "NFKD"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "ByteLevel"},
            {"type": "Prepend", "prepend": word(3)}, LOWER,
        ]  # fmt: skip
        described = _described(_chain(*draw.choices(kinds, k=draw.randint(1, 3)), *map(_named, some)))
        made = Tokenizer.from_str(json.dumps(described)).normalizer
        text = word(12)
        try:
            with library_faults("chain", "ends the library", "take another"):
                normalized = made.normalize_str(text)
        except BadInput:  # some chains of regular expressions and decompositions do
            continue
        grown += len(normalized) > len(text)
        assert len(normalized) <= growth(described) * (len(text) + 1), (described["normalizer"], text)
    assert grown > 100


def _named(character: str) -> dict[str, Any]:
    """Return a rule that names a character and changes nothing."""
    return _replace(f"{character}\0", f"{character}\0")
