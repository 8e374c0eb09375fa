"""The runtime that `shardwright advise` assumes: what it changes, and what the answer says of it."""

import pytest

from shardwright.command.command_line import _exit_code
from shardwright.estimate.runtimes import AttentionKernel, RuntimeName
from shardwright.types import Attention, DataParallel, SequenceParallel
from shardwright_search.advise.question import question_of
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions, System
from shardwright_search.systems.registry import SYSTEMS


def question(model="llama-2-7b", gpus="2x8:H100-SXM", batch=64, **more):
    return question_of(AdviseOptions(model=model, gpus=gpus, batch=batch, **more))


def advise(capsys, *arguments):
    code = _exit_code(APP, ["advise", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_tuned_runtime_is_faster_and_predictions_say_what_is_assumed_of_it():
    steps_s = {}
    for name in RuntimeName:
        asked = question("llama-3-8b", "2x8:H100-SXM", 64, runtime=name)
        choice = asked.setting.uniform(
            "mine", 1, tp_size=4, data_parallel=DataParallel.ZERO2, sequence_parallel=SequenceParallel.MEGATRON
        )
        evaluation = evaluate(asked.setting.plan(choice, "mine"), asked.profiles)
        steps_s[name] = evaluation.estimate.simulated_step_time_s
        assert any(line.startswith("assumed: ") and f"runtime {name}: " in line for line in evaluation.warnings)
    assert steps_s["megatron-core"] < min(steps_s["torchtitan"], steps_s["nanotron"])
    assert steps_s["nanotron"] < steps_s["shardwright"]


def test_the_answer_names_the_runtime_and_who_says_what_it_does(config, capsys):
    asked = (config, "--gpus", "8:H100-SXM", "--batch", 16, "--seq", 512)
    code, told, error = advise(capsys, *asked, "--runtime", "megatron-core", "--uniform")
    assert code == 0, error
    assert "  runtime megatron-core: fused kernels, attention flash3, tensor-parallel messages hide behind" in told
    assert "  megatron-core: NVIDIA NeMo, docs/source/features/optimizations/communication_overlap.rst" in told
    code, told, error = advise(capsys, *asked, "--runtime", "horovod")
    assert (code, told) == (2, "") and error.count("\n") == 1
    assert error.startswith("error: --runtime: ") and "megatron-core" in error
    code, told, error = advise(capsys, *asked, "--attention", "eager", "--precision", "fp8")
    assert (code, told) == (2, "")
    assert error == "error: --attention: eager attention is not estimated with fp8: take flash2 or flash3\n"


@pytest.mark.parametrize("system", System)
def test_a_system_implies_its_runtime_which_runtime_replaces(system):
    """Advice for a system takes its kernels, says whose they are, and who says so; those of another have a name."""
    runtime = SYSTEMS[system].runtime
    implied, named, other = (
        question(target=system),
        question(runtime=runtime.name),
        question(target=system, runtime=RuntimeName.SHARDWRIGHT),
    )
    choice = implied.setting.uniform("mine", 1, data_parallel=DataParallel.ZERO2)
    plan = implied.setting.plan(choice, "mine")
    times_s = [evaluate(plan, each.profiles).estimate.simulated_step_time_s for each in (implied, named, other)]
    assert times_s[0] == times_s[1] != times_s[2]
    assert runtime.name != RuntimeName.SHARDWRIGHT and runtime.sources
    (line,) = (line for line in implied.assumed if line.startswith(f"runtime {runtime.name}: "))
    assert line.endswith(f"(--for {system})")
    assert {f"{runtime.name}: {source}" for source in runtime.sources} <= {*implied.assumed}
    assert any(line.startswith("runtime shardwright: ") and line.endswith("(--runtime)") for line in other.assumed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused": True}, "runtime shardwright: fused kernels, attention flash2"),
        ({"attention": AttentionKernel.FLASH3}, "single operators, attention flash3"),
        ({"overlap_slowdowns": "1.5:2"}, "with slowdowns of 1.5 and 2 inside a node, 1.5 and 2 across nodes"),
    ],
)
def test_one_habit_of_the_runtime_is_told_alone(options, words):
    """Fused kernels, a faster attention and overlap each shorten the same step."""
    steps_s = []
    for told in ({}, options):
        asked = question(seq=4096, **told)
        choice = asked.setting.uniform("mine", 1, data_parallel=DataParallel.ZERO2)
        steps_s.append(evaluate(asked.setting.plan(choice, "mine"), asked.profiles).estimate)
    plain, tuned = (estimate.simulated_step_time_s for estimate in steps_s)
    assert tuned < plain * 0.99
    assert any(words in line for line in asked.assumed)


def test_eager_attention_keeps_scores_and_plans_say_so():
    plain, eager = (question(seq=2048, batch=64, attention=kernel) for kernel in (None, AttentionKernel.EAGER))
    plans = [asked.setting.plan(asked.setting.uniform("mine", 1, 8, tp_size=8), "mine") for asked in (plain, eager)]
    assert [plan.attention for plan in plans] == [Attention.AUTO, Attention.EAGER]
    flash, scores = (evaluate(p, q.profiles).estimate for p, q in zip(plans, (plain, eager), strict=True))
    # Scores and their softmax of 4 heads a rank in 16 bit, in 32 layers: far more than 1 GiB of 8 samples.
    assert scores.memory_bytes > flash.memory_bytes + 2**30
    assert scores.simulated_step_time_s > flash.simulated_step_time_s
