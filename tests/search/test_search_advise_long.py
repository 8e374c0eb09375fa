"""Advice for long samples: context parallelism is searched for them, and a choice of the user's may have it anyhow."""

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import ContextParallel
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import Question, model_of, priced_lengths, question_of, searched_cp_sizes
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, find_best

OPTIONS = AdviseOptions(model="llama-3.1-8b", gpus="4x8:H100-SXM", batch=8)
FITS = "tp=4,mbs=1,zero=3,recompute=full"


def question(seq: int, *against: str) -> Question:
    return question_of(replace(OPTIONS, seq=seq, against=against))


def step_s(asked: Question, choice: str) -> float:
    return evaluate(reading_of(choice, asked.setting).plan, asked.profiles).estimate.simulated_step_time_s


@pytest.mark.parametrize(
    ("seq", "devices", "sizes"),
    [(8192, 64, (1,)), (16384, 64, (1, 2)), (131072, 64, (1, 2, 4, 8, 16)), (131072, 4, (1, 2, 4)), (16386, 64, (1,))],
)
def test_degrees_leave_a_rank_8192_positions_in_equal_chunks(seq: int, devices: int, sizes: tuple[int, ...]) -> None:
    model, _ = model_of(replace(OPTIONS, seq=seq))
    assert searched_cp_sizes(model, devices) == sizes


def test_lengths_are_the_shares_of_all_degrees_that_are_priced() -> None:
    assert priced_lengths(4096, (1, 2), ("tp=8,cp=8", "cp=3", "rule:tp8", "run.toml")) == (512, 2048)
    assert priced_lengths(4096, (1,), ()) == ()


def test_a_few_long_samples_are_shared_out_further_than_heads_are() -> None:
    """8 samples keep 32 GPUs busy by tensor parallelism of 4 at least: context parallelism sends less."""
    asked = question(131072)
    answer = find_best(
        replace(asked.request, fine_grained=False, num_microbatches=(1,), pp_sizes=(1,)),
        *(asked.model, asked.cluster, asked.profiles),
        "--batch",  # type: ignore[arg-type]
        lambda line: None,
    )
    assert isinstance(answer, SearchAnswer)
    best = answer.chosen.evaluation.estimate.simulated_step_time_s
    assert 1 not in {layer.cp_size for layer in answer.chosen.plan.layers}
    assert best < step_s(asked, FITS)
    assert any(line.startswith("derived: block of cp_size") for line in answer.chosen.evaluation.warnings)


def test_a_choice_has_the_degree_that_it_says_whatever_is_searched() -> None:
    choices = [f"{FITS},cp=2{kind}" for kind in ("", ",context=ring")]
    asked = question(8192, *choices)
    assert asked.request.cp_sizes == (1,)
    plans = [reading_of(choice, asked.setting).plan for choice in choices]
    assert {(s.tp_size, s.cp_size, s.dp_size) for plan in plans for s in (*plan.layers, plan.head)} == {(4, 2, 4)}
    assert [plan.layers[0].context for plan in plans] == [ContextParallel.GATHER, ContextParallel.RING]
    assert all(step_s(asked, choice) > 0 for choice in choices)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("tp=8,cp=8", "tp 8 x cp 8 x pp 1 does not divide 32 GPUs"),
        ("tp=8,context=ring", "context without cp above 1: give cp, or leave context out"),
        ("cp=2,context=helix", "context 'helix': choose gather, ring"),
        ("cp=0", "cp '0' is not a number from 1"),
    ],
)
def test_a_choice_that_no_plan_has_is_refused(choice: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        reading_of(choice, question(8192).setting)
