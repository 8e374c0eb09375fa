"""A label of the interleaved schedule replaces another only where no plan through the other is better for it."""

import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from interleaved_problems import random_interleaved, with_budget
from numpy.typing import NDArray

from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Schedule
from shardwright_search.solver import interleaved_problem
from shardwright_search.solver.interleaved import Chain, ChunkLabels, Interleaved
from shardwright_search.solver.interleaved_problem import InterleavedProblem
from shardwright_search.solver.problem import Options

PAIRS, TIMED, OUTERS = 20_000, 1_000, 8
SEEDS = range(60)

Numbers = NDArray[np.float64]


class Lost(NamedTuple):
    """How many labels would be replaced by one that a plan is slower with, or holds more with."""

    by_all: int
    """Where all columns are compared."""
    without: Counter[str]
    """Where one of them is not, by its name."""


def labels_of(numbers: Numbers, layouts: NDArray[np.int64]) -> ChunkLabels:
    """What labels hold is related: a peak has the activations, and making gradients costs no more than they do."""
    chains = []
    for each in np.maximum(0, numbers):
        time, exposed, state, activation, gradient, above, making = each
        peak = activation + above
        making = peak + np.minimum(making, gradient)
        chains.append(Chain(time, exposed, state, activation, gradient, peak, making, np.zeros_like(time), *layouts))
    none = np.zeros(numbers.shape[-1], int)
    return ChunkLabels(tuple(chains), none, none)


def random_pairs(problem: InterleavedProblem, rng: np.random.Generator) -> tuple[ChunkLabels, ChunkLabels]:
    """Labels and others that differ a little; the first ones of them in time, most others in memory."""
    shape = len(problem.spans.ranges), 7, PAIRS
    ones = rng.integers(0, 30, shape) * rng.choice([1, 1, 1, 10], shape)
    changes = rng.integers(-6, 7, shape) * rng.choice([0, 1, 1, 5], shape)
    changes[:, 2:, :TIMED] = 0
    changes[:, :2, TIMED:] *= rng.random(PAIRS - TIMED) < 0.2
    layouts = rng.integers(0, problem.group.redistribution_ps.shape[1], (2, PAIRS))
    return labels_of(ones.astype(float), layouts), labels_of((ones + changes).astype(float), layouts)


def random_options(own: Options, rng: np.random.Generator) -> Options:
    """As many as there are pairs, with layouts of one; often something is large."""
    names = "state_bytes", "late_bytes", "activation_bytes", "workspace_bytes"
    held = {name: rng.integers(0, 9, PAIRS) * rng.choice([0.0, 1.0, 30.0, 300.0], PAIRS) for name in names}
    return own.take(np.zeros(PAIRS, int))._replace(sum_bytes=np.zeros(PAIRS), **held)


def longer(labels: ChunkLabels, position: Options) -> ChunkLabels:
    """With another position behind, in chunks of all kinds, which changes no layout."""
    chains = []
    for chain in labels.chains:
        behind = chain.then(position, np.zeros(PAIRS))
        chains.append(behind._replace(time_ps=chain.time_ps, output_layout=chain.output_layout))
    return labels._replace(chains=tuple(chains))


def hold_more(
    problem: InterleavedProblem, ones: ChunkLabels, others: ChunkLabels, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Whether some plan through the other label holds more than that through the one, whole chunks or parts of them."""
    solver, found = Interleaved(problem), np.zeros(PAIRS, bool)
    kinds = problem.embedding, problem.head, problem.positions[-1]
    for number in range(OUTERS):
        embedding, head, position = (random_options(problem.group.options[kind], rng) for kind in kinds)
        pair = [longer(labels, position) if number % 2 else labels for labels in (others, ones)]
        more, less = (solver._peak_bytes(labels, embedding, head) for labels in pair)
        found |= more > less
    return found


def are_slower(problem: InterleavedProblem, ones: ChunkLabels, others: ChunkLabels) -> NDArray[np.bool_]:
    """Whether some plan through the other label takes longer; of the first labels."""
    solver, rows = Interleaved(with_budget(problem, 1 << 40)), np.arange(TIMED)
    more, less = (solver._whole(labels, rows).objective_ps.reshape(TIMED, -1) for labels in (others, ones))
    return np.pad((more > less).any(1), (0, PAIRS - TIMED))


def names_of(solver: Interleaved, columns: int) -> list[str]:
    """Of times, and of corners of what is held without a peak, with one, and with one that makes gradients."""
    held, numbers = solver._comparison.held, Counter[int]()
    names = [f"time {number}" for number in range(columns - len(held))]
    for each in held:
        names.append(f"peak {each.peak}, corner {numbers[each.peak]}")
        numbers[each.peak] += 1
    return names


def lost(seed: int) -> Lost:
    """Of pairs of labels of a random problem."""
    rng, problem = np.random.default_rng(seed), random_interleaved(seed)
    solver, (ones, others) = Interleaved(problem), random_pairs(problem, rng)
    # Both at once: a column is compared where any label needs it.
    chains = (
        Chain._make(map(np.concatenate, zip(*pair, strict=True)))
        for pair in zip(ones.chains, others.chains, strict=True)
    )
    none = np.zeros(2 * PAIRS, int)
    compared = solver._comparison.columns(ChunkLabels(tuple(chains), none, none))
    larger = compared[PAIRS:] > compared[:PAIRS]
    count = larger.sum(1)
    worse = hold_more(problem, ones, others, rng) | are_slower(problem, ones, others)
    alone = (larger & (worse & (count == 1))[:, None]).sum(0)
    names = names_of(solver, compared.shape[1])
    return Lost(int((worse & (count == 0)).sum()), Counter(dict(zip(names, alone.tolist(), strict=True))))


@pytest.fixture(scope="module")
def every() -> list[Lost]:
    return [lost(seed) for seed in SEEDS]


def test_a_label_that_is_no_larger_in_any_number_is_never_the_worse_one(every: list[Lost]) -> None:
    assert sum(one.by_all for one in every) == 0


def test_each_number_that_is_compared_is_needed(every: list[Lost]) -> None:
    """Labels that are not compared in it replace others that a plan is better with."""
    equal = [one for seed, one in zip(SEEDS, every, strict=True) if random_interleaved(seed).lacking == (0, 0)]
    names = {name for one in equal for name in one.without}
    without = sum((one.without for one in equal), Counter[str]())
    assert {"time 0", "time 1", "peak 0, corner 4", "peak 1, corner 2", "peak 2, corner 1"} <= names
    assert {name for name in names if not without[name]} == set()


@pytest.mark.parametrize("frees_outputs", [False, True])
def test_further_rounds_of_microbatches_bring_no_new_moment(monkeypatch, frees_outputs):
    """Moments of four rounds are those of any more, walked through whole."""
    schedule = schedule_of(Schedule.INTERLEAVED_1F1B)
    whole = interleaved_problem.moments_in_flight.__wrapped__
    for pp_size, num_chunks in itertools.product((2, 3, 4, 6, 8), (2, 3, 4)):
        few = whole(schedule, pp_size, 4 * pp_size, num_chunks, frees_outputs)
        monkeypatch.setattr(interleaved_problem, "_ROUNDS", 100)
        for rounds in (5, 8):
            assert whole(schedule, pp_size, rounds * pp_size, num_chunks, frees_outputs) == few, (pp_size, num_chunks)
        assert whole(schedule, pp_size, pp_size, num_chunks, frees_outputs) != few
        monkeypatch.undo()
        assert whole(schedule, pp_size, 4000 * pp_size, num_chunks, frees_outputs) == few
