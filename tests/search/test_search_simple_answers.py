"""Thirty pairs of a model and a cluster: the simple answer has few strategies, and the bound says how near the best.

Among them are clusters of two types of GPUs, and models whose types of layers alternate.
"""

from pathlib import Path

import pytest

from shardwright_search.advise.question import question_of
from shardwright_search.options import AdviseOptions
from shardwright_search.search import find_best
from shardwright_search.simplest import num_strategies, simplest
from shardwright_search.solver.stopping import CpuSeconds

TOLERANCE = 0.02
PAIRS = """
llama-3-8b 8x8:H100-SXM 512
llama-3-8b 1x8:H100-SXM 64
llama-3.2-1b 1x8:A100-40 256
llama-3.2-3b 2x8:A100-40 128
llama-3-70b 8x8:H100-SXM 512
llama-3-70b 32x8:H100-SXM 1024
llama-2-7b 2x8:A100-80 256
llama-2-70b 8x8:A100-80 512
llama-3.1-405b 128x8:H100-SXM 1024
mistral-7b 1x8:H200 64
phi-4 2x8:H100-SXM 256
qwen2.5-32b 4x8:H100-SXM 256
qwen2.5-72b 16x8:A100-80 512
qwen3-8b 1x8:B200 128
qwen3-30b-a3b 2x8:H100-SXM 512
mixtral-8x7b 8x8:H100-SXM 512
gpt2-xl 1x8:A100-40 128
gpt-3-175b 128x8:A100-80 1536
bert-large 1x8:V100-32 256
vit-huge 1x8:A100-40 512
gpt-oss-20b 2x8:H100-SXM 256
gpt-oss-120b 8x8:H100-SXM 512
gemma-2-9b 2x8:H100-SXM 128
gemma-3-4b 1x8:H100-SXM 64
gemma-3-27b 4x8:H100-SXM 256
command-r7b 1x8:H200 64
gpt2-xl 2x8:A100-40+2x8:A10 128
llama-2-7b 2x8:A100-40+2x8:H100-SXM 256
llama-3-8b 2x8:A100-80+2x8:H100-SXM 256
llama-3.2-3b 1x8:A100-80+1x8:A10 128
"""


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS.strip().splitlines())
def test_a_simple_answer_has_at_most_two_strategies_within_the_tolerance_of_the_bound(pair):
    model, gpus, batch = pair.split()
    options = {"precision": "float16"} if "V100" in gpus else {}
    options |= {"inter_node_gbit_s": "100"} if "+" in gpus else {}
    question = question_of(AdviseOptions(model=model, gpus=gpus, batch=int(batch), **options))
    given = question.request, question.model, question.cluster, question.profiles, Path("--gpus")
    answer = find_best(*given, lambda _: None, CpuSeconds(100))
    simple = simplest(answer, question.budgets, TOLERANCE)
    assert num_strategies(simple.plan.plan) <= 2
    assert question.fits(simple.plan.plan, simple.plan.evaluation.estimate)
    # The fastest plan is the one of the least simulated time, and may itself be further above the bound.
    objective_s, most = simple.plan.evaluation.estimate.objective_s, (1 + TOLERANCE) * (1 + 1e-9)
    assert objective_s <= answer.bound_s * most or simple.plan.sample_s <= answer.chosen.sample_s * most
