"""Data sets give samples by weights, documents of a sample are told apart, and random samples need no data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_sampling import LENGTH, _written
from tiny_models import tiny

from shardwright.io import BadInput
from shardwright_train.data.objectives import RANDOM, Causal, TextBatches
from shardwright_train.data.sampling import BLEND, open_data, open_samples
from shardwright_train.data.share import BatchShare, with_boundaries
from shardwright_train.data.split import Boundaries, Fractions, Split, SplitPart
from shardwright_train.models.base import family_named
from shardwright_train.parallel.vocab import IGNORED

WEIGHTS = (5.0, 3.0, 2.0)


def _blended(folder: Path, weights: tuple[float, ...] = WEIGHTS) -> Path:
    """Data sets whose tokens begin with 0, 1000, 2000..., of 100, 200, 300... tokens."""
    for number in range(len(weights)):
        tokens = np.arange(1000 * number, 1000 * number + 100 * (number + 1))
        _written(folder / str(number), tokens, vocab_size=9000, documents=10)
    datasets = [{"folder": f"../{number}", "weight": weight} for number, weight in enumerate(weights)]
    (folder / "blend").mkdir()
    content = {"format": "shardwright.blend", "version": 1, "datasets": datasets}
    (folder / "blend" / BLEND).write_text(json.dumps(content))
    return folder / "blend"


def test_data_sets_give_samples_by_their_weights_evenly_spread(tmp_path: Path) -> None:
    blend = open_data(_blended(tmp_path), LENGTH, seed=3)
    of = blend.read(np.arange(65_536 + 1000))[:, 0] // 1000
    assert np.bincount(of[:65_536]).tolist() == [32_768, 19_661, 13_107]
    for first in range(0, 65_536, 1000):
        assert np.abs(np.bincount(of[first : first + 1000]) - [500, 300, 200]).max() <= 2
    assert (of[65_536:] == of[:1000]).all()


def test_each_data_set_goes_on_in_its_own_order_across_rounds(tmp_path: Path) -> None:
    blend = open_data(_blended(tmp_path), LENGTH, seed=3)
    indices = np.arange(65_000, 66_500)
    found = blend.read(indices)
    for number in range(3):
        alone = open_samples(tmp_path / str(number), LENGTH, 3)
        mine = found[found[:, 0] // 1000 == number]
        before = int((blend.read(np.arange(65_000))[:, 0] // 1000 == number).sum())
        assert np.array_equal(mine, alone.read(np.arange(before, before + len(mine))))


def test_a_sample_is_the_same_however_it_is_asked_for(tmp_path: Path) -> None:
    blend = open_data(_blended(tmp_path), LENGTH, seed=0)
    together = blend.read(np.arange(64))
    assert all(np.array_equal(blend.read(np.array([i]))[0], together[i]) for i in range(64))


def test_evaluation_sees_all_of_each_data_set_once(tmp_path: Path) -> None:
    blend = open_data(_blended(tmp_path), LENGTH, 0, SplitPart(Split.VALID, Fractions(valid=0.5)))
    assert blend.per_epoch == 9 + 19 + 29
    firsts = blend.read(np.arange(blend.per_epoch))[:, 0].tolist()
    parts = [range(1000 * n + 50 * (n + 1), 1000 * n + 100 * (n + 1) - LENGTH, LENGTH) for n in range(3)]
    assert firsts == [first for part in parts for first in part]


def test_what_cannot_be_blended_is_one_line(tmp_path: Path) -> None:
    blend = _blended(tmp_path, (1.0, 1e-6))
    with pytest.raises(BadInput, match=r"blend\.json: a weight is less than 1/65536 of all"):
        open_data(blend, LENGTH, 0)
    description = tmp_path / "1" / "data.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"tokenizer_sha256": "other"}))
    with pytest.raises(BadInput, match=r"blend\.json: .*1 has another tokenizer than .*0"):
        open_data(blend, LENGTH, 0)


def test_documents_of_a_sample_are_numbered_where_the_index_says(tmp_path: Path) -> None:
    _written(tmp_path, np.arange(100), documents=30)
    starts = np.cumsum([0] + [len(each) for each in np.array_split(np.arange(100), 30)])
    samples = open_samples(tmp_path, LENGTH, seed=1)
    indices = np.arange(samples.per_epoch)
    absolute = np.searchsorted(starts, samples.read(indices), "right")
    assert np.array_equal(samples.documents(indices), absolute - absolute[:, :1])


def test_positions_and_labels_know_where_documents_meet() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2, 2]])
    batch = {"labels": torch.arange(5)[None]}
    both = with_boundaries(batch, documents, Boundaries(True, True), predicts_next=True)
    assert both["documents"].tolist() == [[0, 0, 1, 2, 2]]
    assert both["positions"].tolist() == [[0, 1, 0, 0, 1]]
    assert both["labels"].tolist() == [[0, IGNORED, IGNORED, 3, 4]]
    positions = with_boundaries(batch, documents, Boundaries(False, True), predicts_next=True)
    assert (set(positions), positions["labels"].tolist()) == ({"labels", "positions"}, [[0, 1, 2, 3, 4]])
    assert with_boundaries(batch, documents, Boundaries(True), predicts_next=False)["labels"].tolist() == [
        [0, 1, 2, 3, 4]
    ]


def test_labels_that_count_are_counted(tmp_path: Path) -> None:
    _written(tmp_path, np.arange(100), documents=30)
    objective = Causal(2000, LENGTH)
    plain, told = (objective.open(tmp_path, 0, boundaries=Boundaries(*each)) for each in ((False, True), (True, False)))
    assert isinstance(told, TextBatches)
    for batches, fewer in ((plain, False), (told, True)):
        labels = batches.read(3, BatchShare(1, 8))["labels"]
        assert batches.counted(3, 8) == int((labels != IGNORED).sum())
        assert (batches.counted(3, 8) < 8 * LENGTH) == fewer
    assert plain.sha256 != told.sha256 != objective.open(tmp_path, 0).sha256


@pytest.mark.parametrize("family", ["t5", "vit"])
def test_families_that_cannot_tell_documents_apart_refuse(family: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--reset-attention-mask, --reset-position-ids: "):
        family_named(family, "test").learns(tiny(family)).open(tmp_path, 0, boundaries=Boundaries(True))


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "vit"])
def test_random_samples_are_the_same_for_every_share(family: str) -> None:
    batches = family_named(family, "test").learns(tiny(family)).open(RANDOM, 7)
    whole = batches.read(5, BatchShare(2, 4))
    mine = batches.read(5, BatchShare(2, 4, first=1, samples=2, left_out=frozenset({"labels"})))
    assert "labels" not in mine
    for name, x in mine.items():
        assert torch.equal(x, whole[name][[1, 2, 5, 6]])
    assert batches.counted(5, 8) == int((whole["labels"] != IGNORED).sum())
    with pytest.raises(BadInput, match="random samples have no valid split"):
        family_named(family, "test").learns(tiny(family)).open(RANDOM, 7, SplitPart(Split.VALID, Fractions(0.1)))
