"""What T5 learns by default: spans cut out of a text, by published lengths, lossless, the same under every plan."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_sampling import _written
from tiny_models import tiny
from tokenizers import Tokenizer, models

from shardwright.io import BadInput
from shardwright_train.data.encoder_decoder import Prefix, SpanCorruption, lengths_filling
from shardwright_train.data.objectives import RANDOM, TextBatches
from shardwright_train.data.share import BatchShare
from shardwright_train.data.split import Boundaries
from shardwright_train.data.tokens import DataFolder
from shardwright_train.models.base import family_named
from shardwright_train.parallel.vocab import IGNORED

VOCABULARY, LENGTH, FIRST, END = 2100, 64, 5, 1


def _objective(length: int = LENGTH, vocab_size: int = VOCABULARY) -> SpanCorruption:
    return SpanCorruption(vocab_size, length, first_token=FIRST, end=END)


def _data(folder: Path, tokens: int = 5000, sentinels: int = 0) -> Path:
    """Tokens from 10 on, none twice in a row of 1,900; a tokenizer with so many sentinels, numbered from 1,999 down."""
    folder.mkdir(exist_ok=True)
    _written(folder, 10 + np.arange(tokens) % 1900, vocab_size=2000, documents=5)
    words = {f"<extra_id_{number}>": 1999 - number for number in range(sentinels)}
    Tokenizer(models.WordLevel({"a": 0, **words}, unk_token="a")).save(str(DataFolder(folder).tokenizer))
    return folder


def _opened(folder: Path, length: int = LENGTH, seed: int = 0) -> TextBatches:
    opened = _objective(length).open(folder, seed)
    assert isinstance(opened, TextBatches)
    return opened


@pytest.mark.parametrize(
    ("inputs", "tokens", "targets", "spans"), [(512, 568, 114, 28), (114, 126, 26, 6), (16, 17, 5, 1)]
)
def test_lengths_are_the_published_ones(inputs: int, tokens: int, targets: int, spans: int) -> None:
    """512, 568 and 114 are said in T5's code; the others were worked out by hand."""
    found = lengths_filling(inputs)
    assert (found.inputs, found.tokens, found.targets, found.spans) == (inputs, tokens, targets, spans)


def test_a_sample_with_one_span_worked_out_by_hand(tmp_path: Path) -> None:
    """17 tokens, of which 3 are cut out in one span, and a text ends with a span."""
    opened = _opened(_data(tmp_path, 18, sentinels=3), 16)
    batch = opened.read(0, BatchShare(1, 1))
    assert batch["tokens"].tolist() == [[*range(10, 24), 1999, END]]
    assert batch["labels"].tolist() == [[1999, 24, 25, 26, END, *[IGNORED] * 11]]
    assert batch["decoder_tokens"].tolist() == [[FIRST, 1999, 24, 25, 26, END, *[FIRST] * 10]]
    assert opened.counted(0, 3) == 15


def test_inputs_and_targets_together_are_the_sample(tmp_path: Path) -> None:
    opened = _opened(_data(tmp_path))
    spans, tokens = lengths_filling(LENGTH).spans, lengths_filling(LENGTH).tokens
    sentinels = [VOCABULARY - 1 - number for number in range(spans)]
    batch = opened.read(0, BatchShare(1, 150))
    assert batch["tokens"].shape == batch["labels"].shape == (150, LENGTH)
    lengths = []
    for row in range(150):
        inputs, labels = (batch[name][row].tolist() for name in ("tokens", "labels"))
        said = labels[: labels.index(IGNORED)]
        assert inputs.pop() == said.pop() == END and set(labels[len(said) + 1 :]) == {IGNORED}
        places = [said.index(each) for each in sentinels]
        assert places == sorted(places) and places[0] == 0
        cut = {each: said[a + 1 : b] for each, a, b in zip(sentinels, places, [*places[1:], len(said)], strict=True)}
        assert min(map(len, cut.values())) >= 1 and [each for each in inputs if each in cut] == sentinels
        lengths += map(len, cut.values())
        whole = [token for each in inputs for token in cut.get(each, [each])]
        assert whole == opened.samples.read(np.array([row]))[0][:tokens].tolist()
        assert opened.counted(row, 1) == len(said) + 1
    assert len(set(lengths)) > 2


def test_a_sample_is_the_same_on_any_rank_and_another_under_another_seed_or_epoch(tmp_path: Path) -> None:
    opened = _opened(_data(tmp_path))
    whole = opened.read(6, BatchShare(2, 4))
    for size in (1, 2):
        parts = [opened.read(6, BatchShare(2, 4, first, size)) for first in range(0, 4, size)]
        for name, x in whole.items():
            split = [part[name].view(2, size, LENGTH) for part in parts]
            assert torch.equal(torch.cat(split, 1).view(8, LENGTH), x)
    assert not torch.equal(_opened(tmp_path, seed=1).read(6, BatchShare(2, 4))["labels"], whole["labels"])
    one = _opened(_data(tmp_path / "one", lengths_filling(LENGTH).tokens + 1))
    assert not torch.equal(one.read(0, BatchShare(1, 1))["tokens"], one.read(1, BatchShare(1, 1))["tokens"])


def test_sentinels_are_the_tokenizers_or_the_rows_behind_it_and_too_few_are_refused(tmp_path: Path) -> None:
    _data(tmp_path, sentinels=100)
    objective = _opened(tmp_path).objective
    assert isinstance(objective, SpanCorruption) and objective.sentinels == (1999, 1998, 1997)
    _data(tmp_path, sentinels=2)
    with pytest.raises(BadInput, match=r"2 sentinel tokens for the 3 spans of a sample: .*--objective prefix"):
        _objective().open(tmp_path, 0)
    _data(tmp_path)
    assert _objective(vocab_size=2003).open(tmp_path, 0).per_epoch == 4999 // lengths_filling(LENGTH).tokens
    with pytest.raises(BadInput, match="2 sentinel tokens for the 3 spans"):
        _objective(vocab_size=2002).open(tmp_path, 0)
    with pytest.raises(BadInput, match="--reset-attention-mask"):
        _objective().open(tmp_path, 0, boundaries=Boundaries(True))


def test_random_samples_need_no_tokenizer() -> None:
    batch = _objective().open(RANDOM, 0).read(0, BatchShare(1, 2))
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [lengths_filling(LENGTH).targets] * 2


def test_a_run_of_t5_takes_spans_unless_it_asks_for_a_prefix_and_others_take_neither(tmp_path: Path) -> None:
    t5, model = family_named("t5", "test"), tiny("t5", vocab_size=VOCABULARY)
    spans, prefix = t5.trained_on(model, None), t5.trained_on(model, "prefix")
    assert (type(spans), spans, type(prefix)) == (SpanCorruption, t5.trained_on(model, "span-corruption"), Prefix)
    assert prefix == t5.learns(model)
    _data(tmp_path)
    assert spans.open(tmp_path, 0).sha256 != prefix.open(tmp_path, 0).sha256
    with pytest.raises(BadInput, match="--objective prefix: a llama model does not support it"):
        family_named("llama", "test").trained_on(tiny("llama"), "prefix")
    with pytest.raises(BadInput, match="no eos_token_id"):
        t5.trained_on(tiny("t5", eos_token_id=None), None)
