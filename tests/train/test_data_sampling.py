"""The tokens of a step follow from data, seed and step alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_tokens

from shardwright.io import BadInput, write_document
from shardwright_train.data.sampling import Samples, open_samples
from shardwright_train.data.split import Fractions, Split, SplitPart
from shardwright_train.data.tokens import DataFolder, PreparedData

LENGTH = 5
TOKENS = np.arange(1000, 1043)


def _written(folder: Path, tokens: np.ndarray = TOKENS, vocab_size: int = 2000, documents: int = 1) -> Path:
    files = DataFolder(folder)
    write_tokens(files.tokens, files.index, np.array_split(tokens, documents), max(vocab_size, 2000))
    description = PreparedData(
        text="here",
        source="text",
        glob="*",
        vocab_size=vocab_size,
        documents=documents,
        text_bytes=1,
        tokens=len(tokens),
        tokenizer_sha256="a",
        tokens_sha256="b",
    )
    write_document(files.description, description)
    return folder


def one(samples: Samples, index: int) -> np.ndarray:
    return samples.read(np.array([index]))[0]


def batch_of(samples: Samples, step: int, size: int) -> np.ndarray:
    return samples.read(np.arange(step * size, (step + 1) * size))


def test_a_sample_is_neighbouring_tokens_with_one_more_for_the_last_label(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path), LENGTH, seed=0)
    for index in range(30):
        sample = one(samples, index)
        assert sample.dtype == np.int64
        assert sample.shape == (LENGTH + 1,)
        assert (np.diff(sample) == 1).all()
        assert (sample[0] - 1000) % LENGTH == 0


def test_each_epoch_takes_every_sample_once_in_another_order(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path), LENGTH, seed=0)
    assert samples.per_epoch == 8
    epochs = [[int(one(samples, 8 * epoch + i)[0]) for i in range(8)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1000, 1040, LENGTH))
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_token_but_the_first_is_a_label_once_where_the_length_divides(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path, TOKENS[:41]), LENGTH, seed=3)
    labels = [token for i in range(samples.per_epoch) for token in one(samples, i)[1:].tolist()]
    assert sorted(labels) == TOKENS[1:41].tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(6, 1), (10, 1), (11, 2), (40, 7), (41, 8)])
def test_the_last_sample_has_its_last_label(tokens: int, samples: int, tmp_path: Path) -> None:
    opened = open_samples(_written(tmp_path, TOKENS[:tokens]), LENGTH, seed=0)
    assert opened.per_epoch == samples
    assert {one(opened, index).shape for index in range(samples)} == {(LENGTH + 1,)}


def test_another_seed_gives_another_order_and_the_same_seed_the_same(tmp_path: Path) -> None:
    _written(tmp_path)
    orders = [batch_of(open_samples(tmp_path, LENGTH, seed), 0, 8) for seed in (0, 1, 0)]
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[0], orders[2])


def test_the_order_does_not_change_between_versions(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path), LENGTH, seed=7)
    assert batch_of(samples, 0, 8)[:, 0].tolist() == [1005, 1025, 1010, 1000, 1030, 1015, 1020, 1035]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.sampled_from([1, 2, 3, 4, 8, 12]), st.sampled_from([1, 2, 4]))
def test_any_way_to_share_out_a_batch_sees_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, step: int, batch: int, parts: int
) -> None:
    samples = open_samples(_written(tmp_path_factory.mktemp("data")), LENGTH, seed=1)
    whole = batch_of(samples, step, batch)
    assert whole.shape == (batch, LENGTH + 1)
    rows = [one(samples, step * batch + row) for part in range(parts) for row in range(part, batch, parts)]
    order = [row for part in range(parts) for row in range(part, batch, parts)]
    assert np.array_equal(np.stack(rows), whole[order])


def test_a_resumed_run_sees_what_an_unbroken_one_sees(tmp_path: Path) -> None:
    _written(tmp_path)
    unbroken = open_samples(tmp_path, LENGTH, seed=0)
    first = [batch_of(unbroken, step, 3) for step in range(10)]
    resumed = open_samples(tmp_path, LENGTH, seed=0)
    assert np.array_equal(batch_of(resumed, 7, 3), first[7])


def test_a_batch_may_reach_into_the_next_epoch(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path), LENGTH, seed=0)
    batch = batch_of(samples, 0, 20)
    assert np.array_equal(batch[8:16], np.stack([one(samples, i) for i in range(8, 16)]))


def test_the_tokens_stay_in_their_file(tmp_path: Path) -> None:
    assert isinstance(open_samples(_written(tmp_path), LENGTH, seed=0).tokens, np.memmap)


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path), LENGTH, seed=0)
    samples.check_vocabulary(2000)
    with pytest.raises(BadInput, match=r"data\.json: vocab_size 2000 is more than the model's 1999"):
        samples.check_vocabulary(1999)


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_met(tmp_path: Path) -> None:
    samples = open_samples(_written(tmp_path, np.array([1] * 10 + [1999]), vocab_size=1999), LENGTH, seed=0)
    with pytest.raises(BadInput, match=r"tokens\.bin: a token after number 5 is not in the vocabulary of 1999"):
        batch_of(samples, 0, 2)


def test_data_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, TOKENS[:6])
    assert open_samples(tmp_path, 5, seed=0).per_epoch == 1
    with pytest.raises(BadInput, match=r"6 tokens are fewer than one sample of 6 \+ 1"):
        open_samples(tmp_path, 6, seed=0)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    description = DataFolder(_written(tmp_path)).description
    description.write_text(json.dumps(json.loads(description.read_text()) | {"tokens": 42}))
    with pytest.raises(BadInput, match=r"has 43 tokens, data\.json reports 42"):
        open_samples(tmp_path, LENGTH, seed=0)
    description.unlink()
    with pytest.raises(BadInput, match=r"data\.json: No such file"):
        open_samples(tmp_path, LENGTH, seed=0)


def test_the_identity_of_data_is_its_tokens_not_its_place(tmp_path: Path) -> None:
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    assert open_samples(first, LENGTH, 0).sha256 == open_samples(second, LENGTH, 1).sha256
    description = DataFolder(second).description
    description.write_text(json.dumps(json.loads(description.read_text()) | {"tokens_sha256": "c"}))
    assert open_samples(first, LENGTH, 0).sha256 != open_samples(second, LENGTH, 0).sha256


PARTS = [SplitPart(split, Fractions(valid=0.2, test=0.1)) for split in Split]


def _parts(folder: Path, seed: int = 0) -> list[Samples]:
    _written(folder, np.arange(1000), documents=50)
    return [open_samples(folder, LENGTH, seed, part) for part in PARTS]


def test_splits_are_whole_documents_one_after_the_other(tmp_path: Path) -> None:
    opened = _parts(tmp_path)
    assert [samples.tokens.tolist() for samples in opened] == [
        list(range(700)),
        list(range(700, 900)),
        list(range(900, 1000)),
    ]
    assert [samples.per_epoch for samples in opened] == [139, 39, 19]


def test_a_split_begins_with_the_first_document_behind_its_share(tmp_path: Path) -> None:
    _written(tmp_path, np.arange(1000), documents=3)
    train = open_samples(tmp_path, LENGTH, 0, SplitPart(Split.TRAIN, Fractions(valid=0.5)))
    assert (len(train.tokens), train.first) == (667, 0)


@pytest.mark.parametrize(("fractions", "split"), [(Fractions(valid=0.1), "valid"), (Fractions(test=0.1), "test")])
def test_a_split_that_boundaries_of_documents_leave_empty_is_refused_whichever_is_opened(
    fractions: Fractions, split: str, tmp_path: Path
) -> None:
    _written(tmp_path, np.arange(1000), documents=3)
    for part in (SplitPart(Split.TRAIN, fractions), SplitPart(Split.VALID, fractions)):
        with pytest.raises(
            BadInput, match=rf"0\.1 of 3 documents, .* no tokens to the {split} split: .*--source jsonl"
        ):
            open_samples(tmp_path, LENGTH, 0, part)
    assert open_samples(tmp_path, LENGTH, 0, SplitPart(Split.VALID, Fractions(valid=0.4))).first == 667


def test_evaluation_sees_its_samples_in_their_order_whatever_the_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        _, valid, _ = _parts(tmp_path, seed)
        first = valid.read(np.arange(valid.per_epoch + 2))[:, 0]
        assert first[: valid.per_epoch].tolist() == list(range(700, 895, LENGTH))
        assert first[valid.per_epoch :].tolist() == [700, 705]


def test_no_split_is_another_ones_data(tmp_path: Path) -> None:
    assert len({samples.sha256 for samples in [*_parts(tmp_path), open_samples(tmp_path, LENGTH, 0)]}) == 4


def test_splits_that_leave_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"0\.5 of the data to validate and 0\.5 to test leave none"):
        open_samples(_written(tmp_path), LENGTH, 0, SplitPart(Split.TRAIN, Fractions(0.5, 0.5)))
