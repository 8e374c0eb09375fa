"""Documents are encoded as AutoTokenizer of the same folder does it, and each is closed once."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_calls import call
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from shardwright.io import BadInput
from shardwright_train.cli import APP
from shardwright_train.data import corpora
from shardwright_train.data.prepare import prepare
from shardwright_train.data.sampling import open_data
from shardwright_train.data.tokens import DataFolder, read_tokens

TEXTS = ("to be or not to be", "be  to", "or")
SPECIAL = ("<bos>", "<eos>", "<unk>", "<pad>", "<mask>", "[CLS]", "[SEP]")
WORDS = ("▁", "▁to", "▁be", "▁or", "▁not", "Ġ", "Ġto", "Ġbe", "Ġor", "Ġnot", "to", "be", "or", "not", *"abenort")
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
BOS, EOS, SEP = VOCABULARY["<bos>"], VOCABULARY["<eos>"], VOCABULARY["[SEP]"]
FIRST = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
AROUND = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
LAST = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
ENDS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
ROBERTA = {**ENDS, "cls_token": "<bos>", "sep_token": "<eos>"}
CLS = VOCABULARY["[CLS]"]


class Case(NamedTuple):
    """A tokenizer's own template, its settings, and the tokens that close a document."""

    post_processor: Any
    settings: Mapping[str, Any]
    end: int = EOS
    kind: str = "words"


CASES = {
    "none": Case(None, ENDS),
    "template_first": Case(FIRST, ENDS),
    "template_around": Case(AROUND, ENDS),
    "template_of_another_end": Case(AROUND, {**ENDS, "eos_token": "<mask>"}, VOCABULARY["<mask>"]),
    "bert_processing": Case(processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS)), BERT, SEP),
    "roberta_processing": Case(processors.RobertaProcessing(("<eos>", EOS), ("<bos>", BOS)), ROBERTA),
    "sequence": Case(processors.Sequence([processors.ByteLevel(), FIRST]), ENDS),
    "bos_by_settings": Case(None, {**ENDS, "add_bos_token": True}),
    "both_by_settings": Case(None, {**ENDS, "add_bos_token": True, "add_eos_token": True}),
    "settings_against_template": Case(FIRST, {**ENDS, "add_bos_token": False}),
    "llama": Case(FIRST, {**ENDS, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, kind="metaspace"),
    "llama_without": Case(None, {**ENDS, "tokenizer_class": "LlamaTokenizerFast"}, kind="metaspace"),
    "gemma": Case(None, {**ENDS, "tokenizer_class": "GemmaTokenizer"}, kind="metaspace"),
    "gemma_template": Case(FIRST, {**ENDS, "tokenizer_class": "GemmaTokenizerFast"}, kind="metaspace"),
    "qwen2": Case(None, {**ENDS, "tokenizer_class": "Qwen2Tokenizer"}, kind="bytes"),
    "gpt2": Case(processors.ByteLevel(), {**ENDS, "tokenizer_class": "GPT2Tokenizer"}, kind="bytes"),
    "gpt2_bos": Case(None, {**ENDS, "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, kind="bytes"),
    "roberta": Case(None, {**ROBERTA, "tokenizer_class": "RobertaTokenizer"}, kind="bytes"),
    "t5": Case(LAST, {**ENDS, "tokenizer_class": "T5Tokenizer", "extra_ids": 0}, kind="unigram"),
    "bert": Case(None, {**BERT, "tokenizer_class": "BertTokenizer", "do_lower_case": True}, SEP),
}


def _tokenizer(kind: str) -> Tokenizer:
    if kind == "words":
        made = Tokenizer(models.WordPiece(VOCABULARY, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([(token, -float(number)) for token, number in VOCABULARY.items()], 2, False))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        made = Tokenizer(
            models.BPE(VOCABULARY, [("t", "o"), ("b", "e"), ("o", "r"), ("n", "o")][:3], unk_token="<unk>")
        )
        bytes_ = kind == "bytes"
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if bytes_ else pre_tokenizers.Metaspace()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def _write(case: Case, folder: Path) -> None:
    folder.mkdir()
    tokenizer = _tokenizer(case.kind)
    if case.post_processor is not None:
        tokenizer.post_processor = case.post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(case.settings))


def _documents(folder: Path) -> list[list[int]]:
    files = DataFolder(folder)
    read = read_tokens(files.tokens, files.index)
    ends = np.cumsum(read.index.lengths)
    return [read.tokens[end - length : end].tolist() for end, length in zip(ends, read.index.lengths, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_documents_are_encoded_as_by_auto_tokenizer_and_closed_once(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _write(case, tmp_path / "model")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(str(tmp_path / "d.jsonl"), None, None, None, tmp_path / "out", tmp_path / "model")
    stock: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoded = [stock(text).input_ids for text in TEXTS]
    assert _documents(tmp_path / "out") == [ids if ids[-1] == case.end else [*ids, case.end] for ids in encoded]
    described, bare = DataFolder(tmp_path / "out").read_description(), stock(TEXTS[2], add_special_tokens=False)
    before, after = list(described.tokens_before or ()), list(described.tokens_after or ())
    assert [*before, *bare.input_ids, *after] == _documents(tmp_path / "out")[2]
    # A checkpoint's folder with this tokenizer encodes the same.
    again: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [again(text).input_ids for text in TEXTS] == encoded


def test_a_document_in_several_pieces_begins_and_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(CASES["template_around"], tmp_path / "model")
    monkeypatch.setattr(corpora, "_PIECE_BYTES", 64)
    (tmp_path / "d.txt").write_text("to be or not to be\n" * 20)
    prepare(str(tmp_path / "d.txt"), None, None, None, tmp_path / "out", tmp_path / "model")
    stock: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert _documents(tmp_path / "out") == [stock((tmp_path / "d.txt").read_text()).input_ids]


def test_data_sets_whose_documents_begin_otherwise_do_not_blend(tmp_path: Path) -> None:
    """A folder of an earlier version stays readable, and its documents begin with no token."""
    _write(CASES["template_first"], tmp_path / "model")
    (tmp_path / "d.txt").write_text("to be or not to be\n" * 9)
    prepare(str(tmp_path / "d.txt"), None, None, None, tmp_path / "new", tmp_path / "model")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    file = tmp_path / "old" / "data.json"
    described = json.loads(file.read_text())
    file.write_text(
        json.dumps({key: value for key, value in described.items() if key[:7] != "tokens_" or key[7:] == "sha256"})
    )
    assert open_data(tmp_path / "old", 8, seed=0).per_epoch
    (tmp_path / "both").mkdir()
    sets = [{"folder": f"../{name}", "weight": 1} for name in ("new", "old")]
    (tmp_path / "both" / "blend.json").write_text(
        json.dumps({"format": "shardwright.blend", "version": 1, "datasets": sets})
    )
    with pytest.raises(
        BadInput, match=r"blend.json: documents of .*old begin with different tokens from documents of .*new"
    ):
        open_data(tmp_path / "both", 8, seed=0)


def test_a_post_processor_that_leaves_out_the_text_is_refused(tmp_path: Path) -> None:
    nothing = processors.TemplateProcessing(single="<bos>", special_tokens=[("<bos>", BOS)])
    twice = processors.TemplateProcessing(single="$A <eos> $A", special_tokens=[("<eos>", EOS)])
    for number, (post_processor, places) in enumerate(((nothing, 0), (twice, 2))):
        _write(Case(post_processor, ENDS), folder := tmp_path / str(number))
        (tmp_path / "d.txt").write_text("to be\n")
        called = call(APP, "prepare", "--text", tmp_path / "d.txt", "--tokenizer", folder, "--out", tmp_path / "out")
        assert (called.exit_code, (tmp_path / "out").exists()) == (2, False)
        assert f"tokenizer.json: its post_processor inserts a text in {places} places" in called.stderr


def test_code_of_a_folder_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": [None, "strange.Strange"]}}
    _write(Case(FIRST, {**ENDS, **own}), tmp_path / "model")
    (tmp_path / "model" / "strange.py").write_text("raise SystemExit(77)")
    (tmp_path / "d.txt").write_text("to be\n")
    prepare(str(tmp_path / "d.txt"), None, None, None, tmp_path / "out", tmp_path / "model")
    assert _documents(tmp_path / "out")[0][0] == BOS
    assert "its code is not run: tokenizer.json is used as it is" in capsys.readouterr().err
