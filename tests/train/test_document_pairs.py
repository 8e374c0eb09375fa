"""Pairs of positions that see one another where documents keep to themselves, against masks of a made-up corpus."""

import re

import numpy as np
import pytest
import torch
from command_calls import call
from msgspec.structs import replace
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.plan.layout import zigzag
from shardwright_train.cli import APP
from shardwright_train.data.document_pairs import imbalance, of_ranks, visible_pairs
from shardwright_train.parallel.context import visible

LENGTH = 64


@pytest.fixture
def documents() -> np.ndarray:
    """A corpus of documents whose lengths vary by a factor of a hundred, cut into samples: numbers [8, 64]."""
    lengths = np.random.default_rng(0).lognormal(2.5, 1.2, size=200).astype(int) + 1
    numbers = np.repeat(np.arange(len(lengths)), lengths)[: 8 * LENGTH].reshape(8, LENGTH)
    return numbers - numbers[:, :1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pairs_of_each_rank_are_those_of_its_rows_of_the_mask(documents, causal, ranks):
    order = zigzag(LENGTH, 4) if causal else None
    held = documents if order is None else documents[:, list(order)]
    positions, numbers = torch.tensor(order or range(LENGTH)), torch.from_numpy(held)
    mask = visible(positions, positions, causal, (numbers, numbers))[:, 0]
    wanted = mask.sum(2).reshape(len(held), ranks, -1).sum(2).numpy()
    assert (of_ranks(visible_pairs(documents, causal), order, ranks) == wanted).all()
    assert imbalance(wanted) == pytest.approx(wanted.max(1).sum() * ranks / wanted.sum())
    assert 1.05 < imbalance(wanted) < ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_samples_of_one_document_are_balanced_in_zigzag_order_alone(ranks):
    pairs = visible_pairs(np.zeros((3, LENGTH), int), causal=True)
    assert pairs[0].tolist() == list(range(1, LENGTH + 1))
    assert imbalance(of_ranks(pairs, zigzag(LENGTH, 8), ranks)) == 1
    assert imbalance(of_ranks(pairs, None, ranks)) > 1.4


def test_one_long_document_beside_short_ones_is_the_work_of_few_ranks():
    """The first half is one document: the halves of zig-zag order share it out, and single positions see themselves."""
    numbers = np.maximum(0, np.arange(LENGTH) - LENGTH // 2 + 1)[None]
    pairs = visible_pairs(numbers, causal=True)
    assert pairs[0].tolist() == [*range(1, LENGTH // 2 + 1), *[1] * (LENGTH // 2)]
    inner, outer = sum(range(17, 33)) + 16, sum(range(1, 17)) + 16
    assert of_ranks(pairs, zigzag(LENGTH, 2), 2).tolist() == [[outer, inner]]
    assert imbalance(of_ranks(pairs, zigzag(LENGTH, 2), 2)) == pytest.approx(2 * inner / (inner + outer))


def test_check_says_how_unequal_documents_of_a_corpus_leave_ranks(tmp_path):
    """A text of lines as long as chance has it, prepared as users do; without the option there is nothing to say."""
    draw = np.random.default_rng(1)
    lines = (" ".join(["word"] * int(length)) for length in draw.lognormal(2.0, 1.2, size=80) + 1)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    prepared = ("--text", tmp_path / "text.jsonl", "--vocab-size", 260, "--workers", 1, "--out", tmp_path / "data")
    assert call(APP, "prepare", *map(str, prepared)).exit_code == 0
    plan = random_plan(tiny("llama", vocab_size=260), 0, 2, "float32", stages=1)
    shared = {"tp_size": 1, "cp_size": 2, "dp_size": 1, "tp_consecutive": True}
    layers = tuple(replace(layer, **shared) for layer in plan.layers)
    write_document(tmp_path / "plan.json", replace(plan, layers=layers))
    asked = ("check", str(tmp_path / "plan.json"), "--data", str(tmp_path / "data"))
    checked = call(APP, *asked, "--reset-attention-mask")
    assert checked.exit_code == 0, checked.stderr
    line = re.fullmatch(
        r"--reset-attention-mask: documents of (\d+) samples leave (\d+)% of the pairs of positions, and of cp_size 2 "
        r"the fullest rank has (\d\.\d\d) times the mean's: .*",
        checked.stdout.splitlines()[-1],
    )
    assert line, checked.stdout
    samples, share, unequal = float(line[1]), float(line[2]), float(line[3])
    assert samples > 20
    assert 5 < share < 100
    assert 1 < unequal < 2
    assert call(APP, *asked).stderr.startswith(
        "error: --data: a sample's documents see one another without --reset-attention-mask"
    )
