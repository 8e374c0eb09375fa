"""Megatron-LM's ways to cut layers into stages and chunks: embedding and loss as layers, and the layout string."""

from functools import cache
from itertools import accumulate, pairwise
from math import prod

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import PipelineStage, Plan, Schedule
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.systems.megatron_bridge import MEGATRON_BRIDGE
from shardwright_search.systems.megatron_reader import read_layout, written_layout
from shardwright_search.systems.registry import SYSTEMS

EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS, LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"


@cache
def _question(model: str = "llama-2-7b"):
    return question_of(AdviseOptions(model=model, gpus="2x8:H100-SXM", batch=64, runtime="megatron-core"))


def _read(words: str, pp_size: int, model: str = "llama-2-7b"):
    sizes = f"--tensor-model-parallel-size 1 --pipeline-model-parallel-size {pp_size} --micro-batch-size 1"
    return reading_of(f"{sizes} --use-distributed-optimizer {words}", _question(model).setting)


def _sizes(plan: Plan) -> list[int]:
    """Layers of each range, in the order in which a microbatch goes through them."""
    return [high - low for ranges in zip(*(stage.layers for stage in plan.stages), strict=True) for low, high in ranges]


@pytest.mark.parametrize(
    ("pp_size", "words", "sizes"),
    [
        (2, f"{CHUNKS} 17 {EMBEDDING} {LOSS}", [0, *[1] * 32, 0]),
        (2, f"{EMBEDDING} {LOSS}", [16, 16]),
        (2, f"--num-layers-per-virtual-pipeline-stage 1 {EMBEDDING} {LOSS}", [0, *[1] * 32, 0]),
        (4, f"{CHUNKS} 8", [1] * 32),
        (4, "--num-layers-per-virtual-pipeline-stage 1", [1] * 32),
        (4, "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8", [4, 10, 10, 8]),
        (4, f"--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8 {CHUNKS} 2", [2, 5, 5, 4] * 2),
        (2, f"{LAYOUT} 'E|(t|)*32L'", [0, *[1] * 32, 0]),
        (4, f"{LAYOUT} 'Et*6|(t*8|)*2,t*10L'", [6, 8, 8, 10]),
        (2, f"{LAYOUT} 'Ett||(tt|)*15||L'", [2, 0, *[2] * 15, 0, 0, 0]),
    ],
)
def test_layers_are_cut_as_megatron_lm_cuts_them(pp_size, words, sizes):
    plan = _read(words, pp_size).plan
    assert _sizes(plan) == sizes
    assert plan.schedule is (Schedule.INTERLEAVED_1F1B if len(sizes) > pp_size else Schedule.ONE_F_ONE_B)
    exported = SYSTEMS["megatron"].export(plan, "plan").text.replace("\n", " ")
    assert reading_of(exported, _question().setting).plan.stages == plan.stages
    recipe = MEGATRON_BRIDGE.export(plan, "plan").text
    assert MEGATRON_BRIDGE.read(recipe, "recipe.py", _question().setting).plan.stages == plan.stages


def test_94_layers_embedding_and_loss_are_96_ranges_of_one():
    plan = _read(f"{CHUNKS} 6 {EMBEDDING} {LOSS}", 16, "qwen3-235b-a22b").plan
    assert _sizes(plan) == [0, *[1] * 94, 0]
    assert evaluate(plan, _question("qwen3-235b-a22b").profiles, timeline=False).estimate.simulated_step_time_s > 0


def test_one_of_embedding_and_loss_may_count_as_a_layer():
    model = "llama-3.1-405b"  # 126 layers
    assert _sizes(_read(f"{EMBEDDING} {LOSS} {CHUNKS} 8", 8, model).plan) == [1, *[2] * 62, 1]
    for words, problem in (
        (f"{EMBEDDING} {CHUNKS} 8", "126 layers and 1 for embedding and loss are no multiple of 64 ranges"),
        (
            f"{EMBEDDING} --decoder-first-pipeline-num-layers 4",
            "together with a number of layers of the first or last stage",
        ),
        (f"{LOSS} --num-layers-per-virtual-pipeline-stage 3", "3 for 127 layers in 8 pipeline stages"),
        (f"--decoder-first-pipeline-num-layers 7 {CHUNKS} 2", "7 layers of a stage in 2 chunks"),
    ):
        with pytest.raises(BadInput, match=problem):
            _read(words, 8, model)


@pytest.mark.parametrize(
    ("layout", "sizes", "mtp_layers"),
    [
        ("Ettt|(tt|)*29,m|L", [3, *[2] * 29, 0, 0], 1),
        ("E|(t|)*3,m||L", [0, 1, 1, 1, 0, 0, 0], 1),
        ("Et*3|(tt|)*2|mmL", [3, 2, 2, 0, 0], 2),
        ("E(|tt)*3|L", [0, 2, 2, 2, 0], 0),
        ("Et|*3t*2L", [1, 0, 0, 2], 0),
        ("EL", [0], 0),
    ],
)
def test_a_layout_is_read_as_megatron_lm_reads_it(layout, sizes, mtp_layers):
    assert read_layout("args.txt", layout)[:2] == (sizes, mtp_layers)
    if not mtp_layers:
        assert read_layout("args.txt", written_layout(sizes)).sizes == sizes


@pytest.mark.parametrize(
    "layout",
    ["t*4L", "Et*4", "EEt|tL", "Et|t|L|", "|Et|tL", "E(t|)L", "E((t|)*2)*2L", "Et*2*3L", "Et**3L", "E()*2tL", "EtmtL",
     "Etm|mL", "Et|xL", "Em|tL", "", "Et*99999999999L", "E(t|)*9999999L"],
)  # fmt: skip
def test_a_layout_that_megatron_lm_refuses_is_refused_in_one_line(layout):
    with pytest.raises(BadInput, match=r"^args.txt: pipeline_model_parallel_layout .* (is not understood|more than)"):
        read_layout("args.txt", layout)


def test_a_recipes_layout_of_lists_is_the_same():
    rows = [["embedding", *["decoder"] * 15], ["decoder"] * 17, [], ["loss"]]
    recipe = (
        "    cfg.model.pipeline_model_parallel_size = 4\n    cfg.train.micro_batch_size = 1\n"
        + f"    cfg.model.pipeline_model_parallel_layout = {rows!r}\n"
    )
    with pytest.raises(BadInput, match=r"stages\[2\]: layer range \[32, 32\] is empty"):
        MEGATRON_BRIDGE.read(recipe, "recipe.py", _question().setting)
    read = MEGATRON_BRIDGE.read(recipe.replace("_size = 4", "_size = 2"), "recipe.py", _question().setting)
    assert _sizes(read.plan) == [15, 17, 0, 0]


def test_layers_that_predict_further_tokens_that_were_not_asked_for_are_named():
    assert _read(f"{LAYOUT} 'Et*16|t*16,mL' --mtp-num-layers 1", 2).notes == (
        "its mtp_num_layers is 1: it is priced with 0, by --mtp",
    )
    assert _read("--mtp-num-layers 2", 2).notes[0].startswith("its mtp_num_layers is 2: ")
    assert _read(f"{LAYOUT} 'Et*16|t*16L' --mtp-num-layers 0", 2).notes == ()
    for words, problem in (
        (f"{LAYOUT} 'Et*16|t*16,mL' --mtp-num-layers 2", "mtp_num_layers '2' and 1 layers m in the layout"),
        ("--mtp-num-layers some", "mtp_num_layers 'some' is not a number from 1"),
    ):
        with pytest.raises(BadInput, match=problem):
            _read(words, 2)


@cache
def _with_one():
    """A model of layers with and without experts, with one that predicts a further token."""
    options = AdviseOptions(model="deepseek-v3", gpus="32x8:H100", batch=256, runtime="megatron-core", mtp=1)
    return question_of(options), question_of(replace(options, mtp=0))


@pytest.mark.parametrize(
    ("pp_size", "words", "sizes"),
    [
        (16, f"{LAYOUT} 'Et*3|(tt|)*29,m|L'", [3, *[2] * 29, 1, 0]),
        (16, f"{LAYOUT} 'Et*4|(t*4|)*14,tmL'", [*[4] * 15, 2]),
        (8, "--decoder-last-pipeline-num-layers 5", [8] * 7 + [6]),
    ],
)
def test_a_layer_that_predicts_a_further_token_is_priced_where_it_is(pp_size, words, sizes):
    question, plain = _with_one()
    command = f"--pipeline-model-parallel-size {pp_size} --expert-model-parallel-size 8 --micro-batch-size 1 {words}"
    read = reading_of(f"{command} --mtp-num-layers 1", question.setting)
    assert (_sizes(read.plan), read.notes) == (sizes, ())
    assert question.model.layers == (*plain.model.layers, "sparse.mtp")
    exported = SYSTEMS["megatron"].export(read.plan, "plan").text.replace("\n", " ")
    assert " --mtp-num-layers 1 " in exported and "--num-layers 61 " in exported
    assert reading_of(exported, question.setting).plan.stages == read.plan.stages
    without = reading_of(command.replace(",m", "").replace("tmL", "tL"), plain.setting).plan
    # The step is longer by about a layer and a head, and the last stages hold them.
    took, less = (
        evaluate(plan, each.profiles, timeline=False).estimate
        for plan, each in ((read.plan, question), (without, plain))
    )
    more = question.model.parameter_count - plain.model.parameter_count
    layer = sum(prod(p.shape) for p in plain.model.types["sparse"].parameters if not p.is_buffer)
    # Its copies of the token table and of the last norm are no parameters of their own.
    assert more == layer + 2 * 7168**2 + 3 * 7168
    terms = [sum(sum(s.time_terms_s[t] for t in ("forward", "backward")) for s in e.stages) for e in (took, less)]
    assert 1.01 < terms[0] / terms[1] < 1.06


def test_only_megatron_lm_runs_layers_that_predict_further_tokens():
    question, _ = _with_one()
    plan = reading_of("--pipeline-model-parallel-size 1 --expert-model-parallel-size 8 --micro-batch-size 1 "
                      "--use-distributed-optimizer",
                      question.setting).plan  # fmt: skip
    for other in ("torchtitan", "accelerate", "deepspeed", "galvatron"):
        with pytest.raises(BadInput, match=r"layers\[61\]: sparse\.mtp, which predicts a further token: plan without"):
            SYSTEMS[other].export(plan, "plan")
    with pytest.raises(BadInput, match="--mtp: llama-3-8b is not a causal language model that is trained whole"):
        question_of(AdviseOptions(model="llama-3-8b", gpus="8:H100", frozen=("embedding",), mtp=1))


def test_a_range_without_layers_takes_no_time_and_keeps_what_it_hands_on():
    """Two plans whose stages hold the same layers: one passes each microbatch once more round its stages."""
    question = _question()
    plain, hollow = (
        _with_ranges(_read(f"{CHUNKS} {chunks}", 2).plan, sizes)
        for chunks, sizes in ((2, [8, 8, 8, 8]), (4, [8, 8, 0, 0, 8, 8, 0, 0]))
    )
    first, second = (evaluate(plan, question.profiles).estimate for plan in (plain, hollow))
    for one, other in zip(first.stages, second.stages, strict=True):
        for term in ("forward", "backward"):
            assert one.time_terms_s[term] == other.time_terms_s[term]
        assert one.memory_terms_bytes["parameters"] == other.memory_terms_bytes["parameters"]
        assert one.memory_terms_bytes["activations"] < other.memory_terms_bytes["activations"]
    assert second.simulated_step_time_s > first.simulated_step_time_s


def _with_ranges(plan: Plan, sizes: list[int]) -> Plan:
    ranges, pp_size = list(pairwise((0, *accumulate(sizes)))), len(plan.stages)
    stages = (PipelineStage(ranks=s.ranks, layers=tuple(ranges[i::pp_size])) for i, s in enumerate(plan.stages))
    return replace(plan, stages=tuple(stages))


def test_a_range_without_layers_has_as_many_ranks_as_the_stage_before():
    plan = _with_ranges(_read(f"{CHUNKS} 4", 2).plan, [8, 8, 0, 0, 8, 8, 0, 0])
    uneven = (PipelineStage(ranks=tuple(range(4)), layers=plan.stages[0].layers),)
    others = PipelineStage(ranks=tuple(range(4, 16)), layers=plan.stages[1].layers)
    with pytest.raises(ValueError, match=r"\[16, 16\] is empty: its stage needs .* before, 12, not 4"):
        replace(plan, stages=(*uneven, others))
