"""BERT's inputs and labels, what it refuses, and what each attention kernel is told of padding."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_calls import call
from tiny_models import CONFIGS, SEQUENCE_LENGTH, tiny
from torch import Tensor

from shardwright.io import BadInput, RunFailed
from shardwright_train.cli import APP
from shardwright_train.data.objectives import Masked, TextBatches
from shardwright_train.data.sampling import Samples
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import padding_mask
from shardwright_train.parallel.vocab import IGNORED

LENGTH = 200
VOCABULARY = Masked(vocab_size=1000, sequence_length=LENGTH, mask=999, padding=0)


def drawn(text: Tensor, seed: int = 0, vocabulary: Masked = VOCABULARY) -> Batch:
    return vocabulary.hide(text, torch.Generator().manual_seed(seed))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[np.ndarray], TextBatches]:
    """The tiny BERT's batches of a text."""
    objective = family_named("bert", "test").learns(tiny("bert"))
    assert isinstance(objective, Masked)
    known = {"seed": 0, "sha256": "", "index": None, "tokenizer_sha256": "", "tokens_before": None}
    return lambda text: TextBatches(Samples(tmp_path, text, 61, SEQUENCE_LENGTH, **known), objective)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return VOCABULARY.random_text((500, LENGTH), torch.Generator().manual_seed(7))


def test_of_each_sample_15_percent_of_the_positions_are_labels(text: Tensor) -> None:
    chosen = drawn(text)["labels"] != IGNORED
    assert (chosen.sum(1) == 0.15 * LENGTH).all()
    # Anywhere in the sample.
    assert chosen.any(0).all()


def test_of_the_labels_80_percent_are_masked_10_random_and_10_shown(text: Tensor) -> None:
    batch = drawn(text)
    chosen = batch["labels"] != IGNORED
    tokens, labels = batch["tokens"][chosen], batch["labels"][chosen]
    masked = (tokens == VOCABULARY.mask).float().mean().item()
    shown = (tokens == labels).float().mean().item()
    assert (masked, shown) == (pytest.approx(0.8, abs=0.02), pytest.approx(0.1, abs=0.02))
    other = tokens[(tokens != VOCABULARY.mask) & (tokens != labels)]
    # A token that stands in for another is drawn from all but padding.
    assert other.min() > 0 and len(other.unique()) > 500


def test_a_label_is_the_text_and_what_is_no_label_is_left_as_it_was(text: Tensor) -> None:
    batch = drawn(text)
    chosen = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][chosen], text[chosen])
    assert torch.equal(batch["tokens"][~chosen], text[~chosen])


def test_the_generator_alone_decides_what_is_drawn(text: Tensor) -> None:
    first, again, other = drawn(text), drawn(text), drawn(text, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], other["tokens"])
    assert not torch.equal(first["labels"], other["labels"])


def test_padding_is_masked_and_never_a_label() -> None:
    text = torch.randint(1, 999, (300, 10))
    text[:, 3:] = 0
    batch = drawn(text)
    assert torch.equal(batch["attention_mask"], text != 0)
    assert (batch["labels"][:, 3:] == IGNORED).all() and (batch["tokens"][:, 3:] == 0).all()
    # 15 % of three positions would round to none.
    assert ((batch["labels"] != IGNORED).sum(1) == 1).all()


def test_without_a_padding_token_every_position_counts() -> None:
    text = torch.zeros(50, 10, dtype=torch.int64)
    batch = drawn(text, vocabulary=Masked(vocab_size=1000, sequence_length=10, mask=999, padding=None))
    assert batch["attention_mask"].all()
    assert ((batch["labels"] != IGNORED).sum(1) == 2).all()


def test_a_batch_of_nothing_but_padding_ends_the_run_in_words(opened: Callable[[np.ndarray], TextBatches]) -> None:
    text = np.zeros(4 * SEQUENCE_LENGTH + 1, np.int64) + 59
    with pytest.raises(RunFailed, match="contains only padding"):
        opened(text).counted(0, 2)
    text[3] = 5
    batches = opened(text)
    assert batches.counted(0, 4) == 1
    assert sorted((batches.read(0, BatchShare(1, 4))["labels"] != IGNORED).sum(1).tolist()) == [0, 0, 0, 1]


def test_the_ranks_shares_are_rows_of_one_batch_whose_labels_are_counted_for_all(
    opened: Callable[[np.ndarray], TextBatches],
) -> None:
    text = np.random.default_rng(0).choice([*range(1, 59), 59, 59, 59], 40 * SEQUENCE_LENGTH + 1)
    batches = opened(text)
    whole = batches.read(32, BatchShare(4, 4))
    assert batches.counted(32, 16) == (whole["labels"] != IGNORED).sum()
    mine = batches.read(32, BatchShare(2, 8, first=2, samples=3, left_out=frozenset({"labels"})))
    assert mine.keys() == whole.keys() - {"labels"}
    assert all(torch.equal(x, whole[name][[2, 3, 4, 10, 11, 12]]) for name, x in mine.items())
    again = batches.read(32, BatchShare(16, 1))
    assert all(torch.equal(x, again[name]) for name, x in whole.items())


def test_a_sample_of_a_stream_gives_as_many_inputs_as_the_model_is_long() -> None:
    model, family = tiny("bert"), family_named("bert", "test")
    samples = torch.arange(3 * (SEQUENCE_LENGTH + 1)).view(3, -1) % 50
    batch = family.learns(model).batch(samples, torch.Generator())
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "attention_mask", "labels"), (3, SEQUENCE_LENGTH)
    )
    chosen = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][chosen], samples[:, :-1][chosen])


def test_random_batches_have_padding_behind_some_samples() -> None:
    model, family = tiny("bert"), family_named("bert", "test")
    mask = family.learns(model).random_batch(32, torch.Generator().manual_seed(0))["attention_mask"]
    lengths = mask.sum(1)
    assert lengths.min() < SEQUENCE_LENGTH and lengths.max() == SEQUENCE_LENGTH
    assert torch.equal(mask, torch.arange(SEQUENCE_LENGTH) < lengths[:, None])


def test_flash_attention_gets_the_mask_itself_and_other_kernels_what_they_add() -> None:
    mask = torch.tensor([[True, True, False]])
    assert padding_mask(mask, torch.bfloat16, "flash_attention_2") is mask
    for kernel in ("sdpa", "eager"):
        added = padding_mask(mask, torch.bfloat16, kernel)
        assert (added.dtype, added.shape) == (torch.bfloat16, (1, 1, 1, 3))
        assert added.flatten().tolist() == [0.0, 0.0, torch.finfo(torch.bfloat16).min]


def test_a_published_configuration_without_a_mask_token_is_measured_but_trained_on_no_text(tmp_path: Path) -> None:
    learns = family_named("bert", "test").learns(tiny("bert", mask_token_id=None))
    batch = learns.random_batch(4, torch.Generator().manual_seed(0))
    assert (batch["labels"] != IGNORED).any(1).all()
    with pytest.raises(BadInput, match=r"mask_token_id is missing: add the number of a token that no text contains"):
        learns.open(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": 61}, "mask_token_id 61 is not below vocab_size 61"),
        ({"mask_token_id": 59}, "mask_token_id and pad_token_id are both 59"),
        ({"pad_token_id": 61}, "pad_token_id 61 is not below vocab_size 61"),
        ({"is_decoder": True}, "is_decoder true cannot be trained: it fills in hidden tokens"),
        (
            {"chunk_size_feed_forward": 4},
            "chunk_size_feed_forward 4 cannot be trained",
        ),
        (
            {"tie_word_embeddings": False},
            "tie_word_embeddings false cannot be trained",
        ),
    ],
)
def test_describe_refuses_what_cannot_be_trained_in_one_line(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["bert"] | change))
    options = ["--name", "x", "--sequence-length", "16", "--out", str(tmp_path / "model.json")]
    ended = call(APP, "describe", str(tmp_path), *options)
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: ") and words in ended.stderr
    assert not (tmp_path / "model.json").exists()
