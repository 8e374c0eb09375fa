"""Statements about published runs with experts, held to what `advise --against` says of their plans.

pytorch/torchtitan pull request 1993, NousResearch/torchtitan pull request 19, mlc-ai/pith-train issue 79.
"""

import pytest

from shardwright.types import GIB, Estimate
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions

B200_GIB = 178.35
STATES = "parameters", "gradients", "optimizer"


def estimates(model: str, gpus: str, seq: int, batch: int, *choices: str, compiled: bool = False) -> list[Estimate]:
    asked = question_of(AdviseOptions(model=model, gpus=gpus, seq=seq, batch=batch, compile=compiled))
    return [evaluate(reading_of(choice, asked.setting).plan, asked.profiles).estimate for choice in choices]


def test_states_of_experts_are_16_bytes_a_parameter_and_halve_as_they_are_shared_out_further():
    """168 GiB on 8 GPUs and 139 on 16, at as many samples a rank: 29.1 less, of 16.4 bytes for each of 30.5 G."""
    choice = "mbs=8,zero=3,recompute=full"
    (eight,), (sixteen,) = (estimates("qwen3-30b-a3b", f"{n}x8:B200", 8192, 128 * n, choice) for n in (1, 2))
    (stage,) = eight.stages
    states = sum(stage.memory_terms_bytes[term] for term in STATES)
    assert 8 * states / 30.53e9 == pytest.approx(16.4, rel=0.02)
    assert (eight.memory_bytes - sixteen.memory_bytes) / GIB == pytest.approx(29.1, rel=0.03)


@pytest.mark.long
def test_whole_experts_with_zero3_beat_shared_ones_in_a_pipeline_and_fit():
    """19.4 K tokens/s a GPU of 8 B200 in compiled blocks, against 17.5 K with ep 4 x pp 2."""
    choices = "mbs=4,zero=3,recompute=selective", "mbs=4,ep=4,pp=2,zero=1,recompute=selective"
    whole, shared = estimates("qwen3-30b-a3b", "1x8:B200", 8192, 64, *choices, compiled=True)
    assert whole.memory_bytes < B200_GIB * GIB
    assert 64 * 8192 / 8 / whole.simulated_step_time_s == pytest.approx(19_400, rel=0.1)
    assert whole.simulated_step_time_s < shared.simulated_step_time_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("seq", "samples", "fits"),
    [
        pytest.param(4096, 4, True, id="defaults"),
        pytest.param(4096, 6, True, id="local batch 6"),
        pytest.param(6144, 4, True, id="length 6144"),
        pytest.param(4096, 8, False, id="local batch 8"),
        pytest.param(8192, 4, False, id="length 8192"),
    ],
)
@pytest.mark.parametrize("experts", ["", ",ep=8"])
def test_the_16b_deepseek_fits_8_b200_where_it_ran(seq: int, samples: int, fits: bool, experts: str):
    """All without recomputation: what torchtitan recomputes by default keeps the results of products."""
    choice = f"mbs={samples},zero=3{experts}"
    (estimate,) = estimates("deepseek-v2-lite", "1x8:B200", seq, 8 * samples, choice)
    assert (estimate.memory_bytes < B200_GIB * GIB) is fits
