"""Text becomes tokens: the same ones every time, and the text again when decoded."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_calls import call
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shardwright.io import BadInput, sha256_of_file
from shardwright_train.cli import APP
from shardwright_train.data.prepare import prepare
from shardwright_train.data.sampling import open_samples
from shardwright_train.data.tokenizer import END_OF_TEXT
from shardwright_train.data.tokens import DataFolder, read_tokens

TEXTS = {
    "b.txt": "the quick brown fox jumps over the lazy dog\n" * 5,
    "a/z.txt": "def quick(fox):\n    return fox\n" * 5,
    "a/ü.txt": "Größe, 狐, \u0000 and \U0001f98a\r\n",
    "c.md": "not asked for",
    "empty.txt": "",
}
IN_ORDER = ["a/z.txt", "a/ü.txt", "b.txt"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name, content in TEXTS.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return tmp_path / "text"


def _documents(folder: Path) -> list[list[int]]:
    files = DataFolder(folder)
    read = read_tokens(files.tokens, files.index)
    ends = np.cumsum(read.index.lengths)
    return [read.tokens[end - length : end].tolist() for end, length in zip(ends, read.index.lengths, strict=True)]


def test_every_file_is_a_document_that_decodes_to_its_text(text: Path, tmp_path: Path) -> None:
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(DataFolder(tmp_path / "out").tokenizer))
    documents = _documents(tmp_path / "out")
    assert [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in documents] == [TEXTS[n] for n in IN_ORDER]


def test_a_single_file_is_one_document_whatever_the_glob(text: Path, tmp_path: Path) -> None:
    prepare(str(text / "b.txt"), "*.py", 300, 1.0, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(DataFolder(tmp_path / "out").tokenizer))
    (document,) = _documents(tmp_path / "out")
    assert tokenizer.decode(document, skip_special_tokens=True) == TEXTS["b.txt"]


def test_the_folder_that_one_is_in_is_an_output_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    called = call(APP, "prepare", "--text", text, "--glob", "*.txt", "--vocab-size", 300, "--out", ".")
    assert called.exit_code == 0, called.stderr
    assert len(_documents(tmp_path / "here")) == len(IN_ORDER)


def test_every_document_ends_with_the_end_of_text_and_has_no_other(text: Path, tmp_path: Path) -> None:
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    end = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).token_to_id(END_OF_TEXT)
    for tokens in _documents(tmp_path / "out"):
        assert [place for place, token in enumerate(tokens) if token == end] == [len(tokens) - 1]


def test_a_text_that_spells_the_end_of_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(f"one{END_OF_TEXT}two\n")
    prepare(str(tmp_path), "t.txt", 260, 1.0, tmp_path / "out")
    ((*tokens, last),) = _documents(tmp_path / "out")
    assert last not in tokens
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).decode(tokens) == f"one{END_OF_TEXT}two\n"


def test_the_description_says_what_is_there(text: Path, tmp_path: Path) -> None:
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    files = DataFolder(tmp_path / "out")
    described = files.read_description()
    assert (described.text, described.glob, described.documents) == (str(text), "*.txt", 3)
    assert described.text_bytes == sum(len(TEXTS[name].encode()) for name in IN_ORDER)
    assert described.tokens == sum(map(len, _documents(tmp_path / "out")))
    assert described.vocab_size == Tokenizer.from_file(str(files.tokenizer)).get_vocab_size()
    assert described.tokenizer_sha256 == sha256_of_file(files.tokenizer)
    assert described.tokens_sha256 == sha256_of_file(files.tokens)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "data.json",
        "tokenizer.json",
        "tokens.bin",
        "tokens.idx",
    ]


def test_the_vocabulary_is_as_large_as_asked_where_the_text_gives_it(text: Path, tmp_path: Path) -> None:
    given = {}
    for asked in (257, 280, 5000):
        prepare(str(text), "*.txt", asked, 1.0, tmp_path / "out")
        given[asked] = DataFolder(tmp_path / "out").read_description().vocab_size
        assert max(map(max, _documents(tmp_path / "out"))) < given[asked]
    assert (given[257], given[280]) == (257, 280)
    assert 280 < given[5000] < 5000


def test_preparing_again_in_another_process_gives_the_same_bytes(text: Path, tmp_path: Path) -> None:
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "here")
    call = (
        "import sys, pathlib; from shardwright_train.data.prepare import prepare; "
        "prepare(sys.argv[1], '*.txt', 300, 1.0, pathlib.Path(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", call, str(text), str(tmp_path / "there")]
    subprocess.run(arguments, check=True, env={"PYTHONHASHSEED": "1"}, capture_output=True)
    here, there = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert here == there


def test_what_is_prepared_can_be_sampled(text: Path, tmp_path: Path) -> None:
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    assert open_samples(tmp_path / "out", 8, seed=0).read(np.arange(4)).shape == (4, 9)


def test_the_file_beyond_the_limit_is_cut_at_the_end_of_a_line(text: Path, tmp_path: Path) -> None:
    first, second = (len(TEXTS[name].encode()) for name in IN_ORDER[:2])
    limit = first + second + 100
    prepare(str(text), "*.txt", 300, limit / 2**20, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    cut = tokenizer.decode(_documents(tmp_path / "out")[2])
    assert cut == TEXTS["b.txt"][: 2 * 44]
    assert DataFolder(tmp_path / "out").read_description().text_bytes == first + second + 88


def test_the_standard_library_is_taken_without_its_tests(tmp_path: Path) -> None:
    prepare("python-stdlib", "*.py", 300, 0.05, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in _documents(tmp_path / "out")]
    # __future__.py comes first in the order of names.
    assert "_Feature" in text[0]
    assert 0 < DataFolder(tmp_path / "out").read_description().text_bytes <= 0.05 * 2**20


@pytest.mark.parametrize(
    ("text_argument", "glob", "vocab_size", "fault"),
    [
        ("nowhere", "*.txt", 300, "nowhere: is neither a file nor a folder"),
        (".", "*.rst", 300, "no text in files '*.rst'"),
        (".", "/abs/*", 300, "--glob '/abs/*' cannot be matched"),
        (".", "", 300, "no text in files ''"),
        (".", "*.txt", 256, "--vocab-size: 256 is too small for all bytes"),
    ],
)
def test_text_that_cannot_be_prepared_is_refused_and_nothing_is_written(
    text_argument: str, glob: str, vocab_size: int, fault: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        prepare(str(text / text_argument), glob, vocab_size, 1.0, tmp_path / "out")
    assert fault in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_utf_8_is_named(text: Path, tmp_path: Path) -> None:
    (text / "a" / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin\.txt: not UTF-8 .* at byte 2"):
        prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_word_that_would_take_minutes_to_learn_is_named(text: Path, tmp_path: Path) -> None:
    (text / "a" / "long.txt").write_text("short words first " + 100_001 * "a" + " and last")
    with pytest.raises(BadInput, match=r"text: a word of 100001 characters, over 100000: 'aaaaa"):
        prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_long_line_of_short_words_is_text(text: Path, tmp_path: Path) -> None:
    (text / "a" / "long.txt").write_text(30_000 * "1a_,")
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "out")
    assert DataFolder(tmp_path / "out").read_description().documents == len(IN_ORDER) + 1


def test_a_models_own_tokenizer_is_taken_as_it_is(text: Path, tmp_path: Path) -> None:
    """It neither cuts nor pads here, adds nothing, and its separator closes a document that has no end of sequence."""
    prepare(str(text), "*.txt", 300, 1.0, tmp_path / "trained")
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer.from_file(str(tmp_path / "trained" / "tokenizer.json"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 300)])
    tokenizer.save(str(model / "tokenizer.json"))
    separator = '{"__type": "AddedToken", "content": "[SEP]"}'
    (model / "tokenizer_config.json").write_text(f'{{"eos_token": "</s>", "sep_token": {separator}}}')
    prepare(str(text), "*.txt", None, 1.0, tmp_path / "out", model)
    assert DataFolder(tmp_path / "out").read_description().vocab_size == 301
    plain = _documents(tmp_path / "trained")
    assert _documents(tmp_path / "out") == [[*document[:-1], 300] for document in plain]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: is not a tokenizer"),
        ({"tokenizer.json": "\\x80"}, "tokenizer.json: not valid JSON"),
        ({"tokenizer_config.json": "{}"}, "tokenizer_config.json: has no eos_token or sep_token"),
        ({"tokenizer_config.json": '{"eos_token": "nowhere"}'}, "tokenizer_config.json: has no eos_token"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(text: Path, tmp_path: Path, files: dict[str, str], words: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if "tokenizer_config.json" in files:
        prepare(str(text), "*.txt", 260, 1.0, model)
    for name, content in files.items():
        (model / name).write_text(content)
    with pytest.raises(BadInput) as refused:
        prepare(str(text), "*.txt", None, 1.0, tmp_path / "out", model)
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()
