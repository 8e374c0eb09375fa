"""Loss on completions: what is marked is what transformers and peers mark, and a batch's labels are that."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_calls import call
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.loss.loss_utils import ForCausalLMLoss

from shardwright.io import BadInput, RunFailed
from shardwright_train.cli import APP
from shardwright_train.data.objectives import Causal, Masked, TextBatches
from shardwright_train.data.prepare import How, prepare
from shardwright_train.data.share import BatchShare
from shardwright_train.data.split import Boundaries, LossOn
from shardwright_train.data.tokens import DataFolder, read_tokens
from shardwright_train.models.base import family_named
from shardwright_train.parallel.vocab import IGNORED

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEXT = "what is the weather today? it is fine, and the sky is blue. Größe 狐"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
PAIRS = [
    {"prompt": "what is the weather?", "completion": " it is fine, 狐"},
    {"prompt": "the sky is", "completion": " blue.\n", "id": 3},
    {"prompt": "", "completion": "Größe"},
    {"prompt": "today?", "completion": ""},
]
ASKED = [
    {"role": "system", "content": "the sky <|im_end|> is blue", "name": None},
    {"role": "user", "content": "what?"},
]
ANSWER = {"role": "assistant", "content": "it is 狐\n"}
CHAT = [*ASKED, ANSWER, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "fine"}]
TOKENS = {"input_ids": [1, 7, 8, 9], "labels": [-100, -100, 8, 9]}
Documents = list[tuple[list[int], list[int]]]
"""Tokens and marks of each document."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), first])
    made.save(str(folder / "tokenizer.json"))
    _set_template(folder, TEMPLATE)
    return folder


def _set_template(folder: Path, template: str | None) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


def _prepared(examples: list[Any], tokenizer: Path, folder: Path) -> Documents:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    prepare(str(folder / "t.jsonl"), None, None, None, folder / "out", tokenizer, How(loss_on=LossOn.COMPLETIONS))
    files = DataFolder(folder / "out")
    read, marks = read_tokens(files.tokens, files.index), np.fromfile(files.targets, np.uint8)
    starts = [read.index.document_start(document) for document in range(read.index.num_documents + 1)]
    return [(read.tokens[a:b].tolist(), marks[a:b].tolist()) for a, b in pairwise(starts)]


def test_a_completion_and_its_end_are_learned_and_no_prompt(tokenizer: Path, tmp_path: Path) -> None:
    stock = AutoTokenizer.from_pretrained(str(tokenizer))
    for pair, (ids, marks) in zip(PAIRS, _prepared(PAIRS, tokenizer, tmp_path), strict=True):
        assert ids == [*stock(pair["prompt"] + pair["completion"]).input_ids, stock.eos_token_id]
        # As trl's SFTTrainer marks a pair whose prompt is a prefix in tokens, too.
        prompt = stock(pair["prompt"]).input_ids
        assert ids[: len(prompt)] == prompt
        assert marks == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    described = DataFolder(tmp_path / "out").read_description()
    assert described.targets == np.fromfile(tmp_path / "out" / "targets.bin", np.uint8).sum()
    assert described.tokens_before == (0,) and described.tokens_after == (1,)


def test_a_token_across_the_border_is_learned(tokenizer: Path, tmp_path: Path) -> None:
    whole = AutoTokenizer.from_pretrained(str(tokenizer))("the weather").input_ids
    assert len(whole) == 4
    ((ids, marks),) = _prepared([{"prompt": "the we", "completion": "ather"}], tokenizer, tmp_path)
    assert (ids, marks) == ([*whole, 1], [0, 0, 1, 1, 1])


def test_messages_have_the_tokens_and_marks_of_transformers(tokenizer: Path, tmp_path: Path) -> None:
    ((ids, marks),) = _prepared([{"messages": CHAT}], tokenizer, tmp_path)
    stock = AutoTokenizer.from_pretrained(str(tmp_path / "out"))  # the template is kept beside the tokens
    wanted = stock.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    assert ids == wanted["input_ids"]
    assert marks == wanted["assistant_masks"] and 0 < sum(marks) < len(marks)
    assert DataFolder(tmp_path / "out").read_description().tokens_before == ()


def test_an_answer_that_begins_with_a_space_is_learned(tokenizer: Path, tmp_path: Path) -> None:
    """transformers finds no token at a space that the post-processor cuts from offsets, and marks nothing then."""
    answer = {"role": "assistant", "content": " it"}
    ((ids, marks),) = _prepared([{"messages": [*ASKED, answer]}], tokenizer, tmp_path)
    stock = AutoTokenizer.from_pretrained(str(tokenizer))
    assert [token for token, mark in zip(ids, marks, strict=True) if mark] == stock(" it<|im_end|>").input_ids[1:]


def test_a_prompt_of_messages_needs_no_marks_in_the_template(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "unmarked")
    _set_template(tmp_path / "unmarked", UNMARKED)
    ((ids, marks),) = _prepared([{"prompt": ASKED, "completion": [ANSWER]}], tmp_path / "unmarked", tmp_path)
    stock = AutoTokenizer.from_pretrained(str(tmp_path / "unmarked"))
    prompt = stock.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == stock.apply_chat_template([*ASKED, ANSWER], return_dict=True)["input_ids"]
    assert marks == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_tokens_are_taken_with_their_labels(tokenizer: Path, tmp_path: Path) -> None:
    assert _prepared([TOKENS], tokenizer, tmp_path) == [(TOKENS["input_ids"], [0, 0, 1, 1])]


@pytest.mark.parametrize(
    ("examples", "template", "message"),
    [
        ([{"text": "a"}], TEMPLATE, "line 1: has no completion: give one of prompt and completion; prompt"),
        ([{"prompt": "a", "completion": 3}], TEMPLATE, "line 1: Expected `str | array`, got `int` - at `$.completion`"),
        ([{"prompt": "a", "completion": [ANSWER]}], TEMPLATE, "line 1: prompt and completion are a text and messages"),
        ([PAIRS[0] | {"messages": CHAT}], TEMPLATE, "line 1: has prompt and completion beside messages"),
        ([PAIRS[0], TOKENS], TEMPLATE, "line 2: has input_ids and labels, the first example prompt and completion"),
        ([TOKENS | {"labels": [-100, 8]}], TEMPLATE, "line 1: 2 labels for 4 tokens: give each token its label"),
        ([TOKENS | {"labels": [7, 8, 9, -100]}], TEMPLATE, "line 1: labels[0] is 7, its token 1: give each token"),
        ([{"input_ids": [10**9], "labels": [-100]}], TEMPLATE, "line 1: input_ids[0] is 1000000000, the tokenizer has"),
        ([TOKENS | {"labels": [-100] * 4}], TEMPLATE, "no example has a token to learn"),
        ([{"messages": CHAT}], UNMARKED, "tokenizer_config.json: the chat_template does not mark the assistant's part"),
        ([{"messages": CHAT}], None, "tokenizer_config.json: has no chat_template, which messages need"),
        ([{"messages": [{"content": "a"}]}], TEMPLATE, "line 1: the chat_template refuses it"),
        (
            [{"prompt": ASKED, "completion": [ANSWER]}],
            "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
            "line 1: the chat template writes the prompt differently once an answer follows",
        ),
    ],
)
def test_what_cannot_be_learned_is_one_line(
    examples: list[Any], template: str | None, message: str, tokenizer: Path, tmp_path: Path
) -> None:
    shutil.copytree(tokenizer, tmp_path / "own")
    _set_template(tmp_path / "own", template)
    with pytest.raises(BadInput) as refused:
        _prepared(examples, tmp_path / "own", tmp_path / "data")
    assert message in str(refused.value)
    assert not (tmp_path / "data" / "out").exists()


def test_options_that_contradict_it_are_one_line(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(PAIRS[0]))
    (tmp_path / "t.txt").write_text("a")
    own = ("--tokenizer", tokenizer)
    for text, more, message in (
        ("t.jsonl", ("--vocab-size", 300), "needs a tokenizer: pass the model's with --tokenizer"),
        ("t.jsonl", (*own, "--field", "prompt"), "examples have fields of their own: docs/data.md: leave it out"),
        ("t.txt", own, "a source of text has no prompts and completions: pass JSON lines"),
        ("t.txt", ("--source", "captions"), "does not apply to captions: leave it out"),
    ):
        options = ("--text", tmp_path / text, "--loss-on", "completions", *more, "--out", tmp_path / "out")
        called = call(APP, "prepare", *options)
        assert (called.exit_code, message in called.stderr) == (2, True), called.stderr


def _open(folder: Path, loss_on: LossOn | None = None, resets: bool = False, length: int = 8) -> TextBatches:
    opened = Causal(300, length, loss_on=loss_on).open(folder, 0, boundaries=Boundaries(resets, resets))
    assert isinstance(opened, TextBatches)
    return opened


def test_labels_of_packed_samples_are_the_marked_tokens(tokenizer: Path, tmp_path: Path) -> None:
    documents = _prepared(PAIRS * 4, tokenizer, tmp_path)
    labels = np.concatenate([np.where(np.array(marks) == 1, ids, IGNORED) for ids, marks in documents])
    inputs = np.concatenate([ids for ids, _ in documents])
    share = BatchShare(2, 3)
    for batches in (_open(tmp_path / "out"), _open(tmp_path / "out", LossOn.COMPLETIONS)):
        samples, batch = batches.samples, batches.read(6, share)
        firsts = samples.numbers(6 + share.rows) * 8  # type: ignore[union-attr]
        assert batch["tokens"].tolist() == [inputs[first : first + 8].tolist() for first in firsts]
        assert batch["labels"].tolist() == [labels[first + 1 : first + 9].tolist() for first in firsts]
        assert batches.counted(6, 6) == (batch["labels"] != IGNORED).sum()
        # Of a later step as of the first: the part of a rank that reads only the second micro-batch's end.
        part = batches.read(6, BatchShare(2, 3, first=2, samples=1, left_out=frozenset({"tokens"})))
        assert part["labels"].tolist() == batch["labels"][[2, 5]].tolist() and "tokens" not in part


def test_the_loss_is_that_of_transformers_over_the_same_labels(tokenizer: Path, tmp_path: Path) -> None:
    documents = _prepared(PAIRS * 4, tokenizer, tmp_path)
    labels = torch.tensor(
        [token if mark else IGNORED for ids, marks in documents for token, mark in zip(ids, marks, strict=True)]
    )
    batches = _open(tmp_path / "out", length=len(labels) - 1)
    batch = batches.read(0, BatchShare(1, 1))
    logits = torch.randn(1, len(labels) - 1, 300, generator=torch.Generator().manual_seed(0))
    stock = ForCausalLMLoss(torch.cat([logits, logits[:, :1]], 1), labels[None], 300)
    mine = torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum") / batches.counted(0, 1)
    torch.testing.assert_close(mine, stock)


def test_documents_that_see_only_themselves_learn_no_first_token(tokenizer: Path, tmp_path: Path) -> None:
    _prepared([{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}] * 12, tokenizer, tmp_path)
    apart, across = _open(tmp_path / "out", resets=True), _open(tmp_path / "out")
    labels = apart.read(0, BatchShare(1, 4))["labels"]
    assert set(labels.unique().tolist()) == {IGNORED, 8, 9}
    assert apart.counted(0, 4) == (labels != IGNORED).sum() < across.counted(0, 4) == 32


def test_marks_are_part_of_the_data_of_a_run(tokenizer: Path, tmp_path: Path) -> None:
    _prepared(PAIRS * 4, tokenizer, tmp_path)
    whole, marked = _open(tmp_path / "out", LossOn.ALL), _open(tmp_path / "out")
    assert IGNORED not in whole.read(0, BatchShare(1, 4))["labels"]
    assert whole.counted(0, 4) == 32
    assert whole.sha256 == whole.samples.sha256 != marked.sha256
    assert marked.sha256 == _open(tmp_path / "out", LossOn.COMPLETIONS).sha256
    (tmp_path / "out" / "targets.bin").write_bytes(bytes(read := len((tmp_path / "out" / "targets.bin").read_bytes())))
    with pytest.raises(BadInput, match=r"targets\.bin: its SHA-256 differs"):
        _open(tmp_path / "out").check_contents()
    (tmp_path / "out" / "targets.bin").write_bytes(bytes(read - 1))
    with pytest.raises(BadInput, match=rf"targets\.bin: has {read - 1} bytes for {read} tokens"):
        _open(tmp_path / "out")


def test_a_blend_learns_all_of_a_part_without_marks(tokenizer: Path, tmp_path: Path) -> None:
    _prepared(PAIRS * 40, tokenizer, tmp_path / "a")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(20)))
    prepare(str(tmp_path / "b.jsonl"), None, None, None, tmp_path / "b" / "out", tokenizer)
    parts = [{"folder": f"{part}/out", "weight": 1.0} for part in "ab"]
    (tmp_path / "blend.json").write_text(json.dumps({"format": "shardwright.blend", "version": 1, "datasets": parts}))
    labels = _open(tmp_path).read(0, BatchShare(1, 16))["labels"]
    assert [IGNORED in row for row in labels] == [True, False] * 8
    with pytest.raises(BadInput, match=r"b/out/data\.json: does not mark completions: prepare the data with"):
        _open(tmp_path, LossOn.COMPLETIONS)


def test_a_batch_without_a_target_is_refused_by_name(tokenizer: Path, tmp_path: Path) -> None:
    _prepared([{"input_ids": [7] * 65, "labels": [-100] * 60 + [7] * 5}], tokenizer, tmp_path)
    batches = _open(tmp_path / "out")
    empty = [number for number in range(8) if (batches.read(number, BatchShare(1, 1))["labels"] == IGNORED).all()]
    assert len(empty) == 7
    with pytest.raises(
        RunFailed, match=f"samples {empty[0]} to {empty[0]}, which are a batch, hold no token of a compl"
    ):
        batches.counted(empty[0], 1)
    assert batches.counted(0, 8) == 5


def test_models_that_learn_no_part_of_a_text_refuse_it(tokenizer: Path, tmp_path: Path) -> None:
    _prepared(PAIRS * 4, tokenizer, tmp_path)
    masked = Masked(300, 8, mask=2, padding=None).open(tmp_path / "out", 0)
    assert masked.sha256 == _open(tmp_path / "out", LossOn.ALL).sha256  # what is hidden is learned
    from tiny_models import tiny

    with pytest.raises(BadInput, match="a bert model cannot be trained on completions only: leave it out"):
        family_named("bert", "test").trained_on(tiny("bert"), None, LossOn.COMPLETIONS)
    with pytest.raises(BadInput, match="random samples have no completions"):
        Causal(300, 8, loss_on=LossOn.COMPLETIONS).open(Path("random"), 0)
