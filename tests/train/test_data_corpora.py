"""Whatever a text lies in, its documents become tokens in their order; what is damaged is one line."""

import bz2
import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from token_files import write_tokens
from tokenizers import Tokenizer, models, pre_tokenizers

from shardwright.io import BadInput, RunFailed
from shardwright_train.data import corpora, prepare
from shardwright_train.data.corpora import Source
from shardwright_train.data.tokens import DataFolder, read_tokens

TEXTS = ["def one():\n    return 1\n", "", "zwei: Größe 狐\n\nund drei", "x" * 50 + "\n" + "y y\n" * 30]
KEPT = [text for text in TEXTS if text]
PAGE = "<page><title>t</title><ns>{ns}</ns>{more}<revision><text>{text}</text></revision></page>"
DUMP = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><ns>0</ns></siteinfo>{}</mediawiki>'


def _prepared(text: Path | str, out: Path, **how: object) -> list[str]:
    """What the documents of a text are when their tokens are made text again."""
    prepare.prepare(str(text), None, 300, None, out, how=prepare.How(**how))  # type: ignore[arg-type]
    return _texts(out)


def _texts(folder: Path) -> list[str]:
    files = DataFolder(folder)
    tokenizer, read = Tokenizer.from_file(str(files.tokenizer)), read_tokens(files.tokens, files.index)
    starts = [read.index.document_start(document) for document in range(read.index.num_documents + 1)]
    return [tokenizer.decode(read.tokens[a : b - 1].tolist()) for a, b in pairwise(starts)]


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "packed"), [("t.jsonl", bytes), ("t.jsonl.gz", gzip.compress), ("t.jsonl.bz2", bz2.compress)]
)
def test_each_line_of_json_is_a_document(name: str, packed: Callable[[bytes], bytes], tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "body": text, "more": {"text": []}}) for i, text in enumerate(TEXTS)]
    (tmp_path / name).write_bytes(packed("\n\n".join(lines).encode()))
    assert _prepared(tmp_path / name, tmp_path / "out", field="body") == KEPT
    described = DataFolder(tmp_path / "out").read_description()
    assert (described.source, described.documents) == ("jsonl", len(KEPT))
    assert described.text_bytes == sum(len(text.encode()) for text in KEPT)


def _dump(pages: list[str]) -> bytes:
    return DUMP.format("".join(pages)).encode()


def test_each_article_of_wikipedia_is_a_document_and_no_talk_or_redirect(tmp_path: Path) -> None:
    pages = [PAGE.format(ns=0, more="", text=f"{i} &lt;b&gt;[[a|'''b''']]") for i in range(3)]
    pages[1:1] = [PAGE.format(ns=1, more="", text="talk"), PAGE.format(ns=0, more="<redirect title='x'/>", text="no")]
    (tmp_path / "w.xml.bz2").write_bytes(bz2.compress(_dump(pages)))
    found = _prepared(tmp_path / "w.xml.bz2", tmp_path / "out", source=Source.WIKITEXT)
    assert found == [f"{i} <b>[[a|'''b''']]" for i in range(3)]


def test_articles_are_read_without_their_markup(tmp_path: Path) -> None:
    pytest.importorskip("mwparserfromhell")
    text = "'''Ada''' wrote {{citation needed}} [[program (computing)|programs]]."
    (tmp_path / "w.xml.bz2").write_bytes(bz2.compress(_dump([PAGE.format(ns=0, more="", text=text)])))
    assert _prepared(tmp_path / "w.xml.bz2", tmp_path / "out") == ["Ada wrote  programs."]


def test_each_row_of_a_saved_data_set_is_a_document(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")

    def rows(texts: list[str | None]) -> object:
        table = datasets.table.InMemoryTable(arrow.table({"body": texts}))
        return datasets.Dataset(table, fingerprint="of this test")

    splits = {"train": rows([*TEXTS, None]), "test": rows(TEXTS[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert _prepared(tmp_path / "saved", tmp_path / "out", field="body") == KEPT
    assert _prepared(tmp_path / "saved", tmp_path / "test", field="body", dataset_split="test") == KEPT[:1]
    for how, fault in (({"field": "text"}, "no column 'text'"), ({"dataset_split": "dev"}, "no split 'dev'")):
        with pytest.raises(BadInput, match=fault):
            _prepared(tmp_path / "saved", tmp_path / "none", **how)


def _giant(page: str) -> bytes:
    """A dump of a page and one of 1 GiB, in 46 KB: streams of bz2 follow one another."""
    head, tail = _dump([page, PAGE.format(ns=0, more="", text="\0")]).split(b"\0")
    return bz2.compress(head) + bz2.compress(b"x" * (1 << 20)) * 1024 + bz2.compress(tail)


GIANT = _giant(PAGE.format(ns=0, more="", text="a"))
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "empty": ("t.jsonl", b"", r"t\.jsonl: no text"),
    "documents without text": ("t.jsonl", b'{"text": ""}\n', r"t\.jsonl: no text"),
    "no JSON": ("t.jsonl", b'{"text": "a"}\n{"text": \n', r"t\.jsonl: line 2: "),
    "not an object": ("t.jsonl", b'{"text": "a"}\n\n[1]\n', r"t\.jsonl: line 3: "),
    "no text": ("t.jsonl", b'{"text": 3}\n', r"t\.jsonl: line 1: Expected `str`, got `int`"),
    "no such field": ("t.jsonl", b'{"txet": "a"}\n', r"line 1 has no field 'text': choose one with --field: txet"),
    "no UTF-8": ("t.jsonl", b'{"text": "\xff"}\n', r"t\.jsonl: line 1: "),
    "nested too deeply": (
        "t.jsonl",
        b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        r"t\.jsonl: line 2 is nested too deeply: leave it out",
    ),
    "truncated gzip": ("t.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9], r"t\.jsonl\.gz: is damaged"),
    "no gzip": ("t.jsonl.gz", b'{"text": "a"}\n', r"t\.jsonl\.gz: is damaged after line 0"),
    "no bz2": ("w.xml.bz2", b"<mediawiki/>", r"w\.xml\.bz2: is damaged after page 0"),
    "truncated bz2": ("w.xml.bz2", bz2.compress(_dump([]))[:-8], r"w\.xml\.bz2: is damaged after page 0"),
    "XML cut off": (
        "w.xml",
        _dump([PAGE.format(ns=0, more="", text="a")])[:-12],
        r"w\.xml: is damaged after page 1 \(no element found",
    ),
    "a page of a GiB": ("w.xml.bz2", GIANT, r"w\.xml\.bz2: page 2 is longer than 32 MiB: leave it out"),
    "no articles": ("w.xml", _dump([]), r"w\.xml: no text"),
    "megatron without a tokenizer": ("t.idx", b"", r"t\.idx: its tokens need the tokenizer that made them"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_corpus_is_refused_in_one_line_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    name, content, fault = DAMAGED[case]
    (tmp_path / name).write_bytes(content)
    source = Source.WIKITEXT if name.startswith("w") else Source.AUTO
    with pytest.raises(BadInput, match=fault) as refused:
        _prepared(tmp_path / name, tmp_path / "out", source=source)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("package", ["datasets", "mwparserfromhell"])
def test_what_takes_a_package_says_so(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / "w.xml").write_bytes(_dump([]))
    source, text = (Source.DATASETS, tmp_path) if package == "datasets" else (Source.WIKIPEDIA, tmp_path / "w.xml")
    with pytest.raises(BadInput, match=rf"needs the package `{package}`: pip install 'shardwright\["):
        _prepared(text, tmp_path / "out", source=source)


def test_pieces_of_a_long_text_are_the_text_and_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut behind lines, words or characters; behind lines the tokens are those of the whole."""
    monkeypatch.setattr(corpora, "_PIECE_BYTES", 64)
    lines = "".join(f"line {i}:\n\n    x = {i}\n" for i in range(200))
    for text in (lines, "狐" * 100, "ab cd " * 50, "\n" * 90):
        (tmp_path / "t.txt").write_text(text)
        pieces = list(corpora.text_pieces((tmp_path / "t.txt",)))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].at == len(text.encode())
        assert len(pieces) >= len(text.encode()) // 64
        if text is lines:
            assert all(piece.text[-1] == "\n" for piece in pieces)
            splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
            whole = [word for word, _ in splitter.pre_tokenize_str(text)]
            assert [word for piece in pieces for word, _ in splitter.pre_tokenize_str(piece.text)] == whole


class _Killed(BaseException):
    """Ends preparing as a signal would, and leaves what has been written."""


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_what_goes_on_after_a_kill_is_to_the_byte_what_is_never_killed(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a document, and after a shard that was not written whole."""
    monkeypatch.setattr(prepare, "_SHARD_PIECES", 3)
    monkeypatch.setattr(corpora, "_PIECE_BYTES", 50)
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words in a line\n" * number * 2)
    original, made = prepare.Encoder.__call__, list[Path]()

    def make(encoder: prepare.Encoder, shard: Path, pieces: list[corpora.TextPiece]) -> tuple[int, int]:
        if len(made) == after:
            shard.with_name(f".{shard.name}.tmp").write_bytes(b"what a kill cut off")
            raise _Killed
        made.append(shard)
        return original(encoder, shard, pieces)

    unbroken = _prepared(tmp_path / "text", tmp_path / "whole", workers=1)
    with monkeypatch.context() as killing:
        killing.setattr(prepare.Encoder, "__call__", make)
        with pytest.raises(_Killed):
            _prepared(tmp_path / "text", tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "data.json").exists()
    again: list[Path] = []
    monkeypatch.setattr(prepare.Encoder, "__call__", lambda own, *to: (again.append(to[0]), original(own, *to))[1])
    assert _prepared(tmp_path / "text", tmp_path / "out", workers=1) == unbroken
    assert again and not set(again) & set(made)
    assert _bytes_of(tmp_path / "out") == _bytes_of(tmp_path / "whole")


def test_a_text_that_has_changed_since_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "first"}\n')

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as killing, pytest.raises(_Killed):
        killing.setattr(prepare, "write_index", killed)
        _prepared(tmp_path / "t.jsonl", tmp_path / "out")
    (tmp_path / "t.jsonl").write_text('{"text": "second"}\n')
    assert _prepared(tmp_path / "t.jsonl", tmp_path / "out") == ["second"]


@pytest.mark.parametrize("damage", [b"", b"no archive", None], ids=["empty", "other", "cut"])
def test_a_damaged_shard_is_removed_and_made_again(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "first"}\n')

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as killing, pytest.raises(_Killed):
        killing.setattr(prepare, "write_index", killed)
        _prepared(tmp_path / "t.jsonl", tmp_path / "out")
    (shard,) = (tmp_path / "out/unfinished").glob("*.npz")
    shard.write_bytes(shard.read_bytes()[:-40] if damage is None else damage)
    with pytest.raises(RunFailed, match=r"000000000\.npz was damaged and has been removed: run the same command again"):
        _prepared(tmp_path / "t.jsonl", tmp_path / "out")
    assert _prepared(tmp_path / "t.jsonl", tmp_path / "out") == ["first"]


def test_worker_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i} " * (i % 7) + "end" for i in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert _prepared(tmp_path / "t.jsonl", tmp_path / "one") == texts
    monkeypatch.setattr(prepare, "_SHARD_PIECES", 4)
    assert _prepared(tmp_path / "t.jsonl", tmp_path / "two", workers=2) == texts
    assert _bytes_of(tmp_path / "one") == _bytes_of(tmp_path / "two")


def _model(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "end"}')
    return folder


def test_a_word_that_a_tokenizer_has_no_token_for_is_one_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"known": 0, "end": 1}, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "t.txt").write_text("known words")
    with pytest.raises(BadInput, match=r"tokenizer\.json: cannot encode a text .*\[UNK\]"):
        prepare.prepare(str(tmp_path / "t.txt"), None, None, None, tmp_path / "out", _model(tmp_path / "m", tokenizer))
    assert not (tmp_path / "out").exists()


def test_megatrons_own_files_are_taken_with_their_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)} | {"end": 9}, unk_token="w0"))
    model = _model(tmp_path / "m", tokenizer)
    documents = [np.array([1, 2, 9]), np.array([4, 9])]
    write_tokens(tmp_path / "c.bin", tmp_path / "c.idx", documents, 70_000)
    prepare.prepare(str(tmp_path / "c.idx"), None, None, None, tmp_path / "out", model)
    files = DataFolder(tmp_path / "out")
    described = files.read_description()
    assert (described.source, described.documents, described.tokens, described.vocab_size) == ("megatron", 2, 5, 10)
    assert files.tokens.read_bytes() == (tmp_path / "c.bin").read_bytes()
    assert files.index.read_bytes() == (tmp_path / "c.idx").read_bytes()
    write_tokens(tmp_path / "d.bin", tmp_path / "d.idx", [*documents, np.array([3, 10])], 70_000)
    with pytest.raises(BadInput, match=r"d\.bin: token number 6 is 10, the tokenizer has 10"):
        prepare.prepare(str(tmp_path / "d.idx"), None, None, None, tmp_path / "no", model)
    assert not (tmp_path / "no").exists()
