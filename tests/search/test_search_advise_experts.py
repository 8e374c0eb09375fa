"""Choices that share experts out, read from three languages, and priced."""

import pytest
from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import DataParallel, ExpertStrategy, SequenceParallel
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.space.uniform import UniformStrategy

MEGATRON = """--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --use-megatron-fsdp
--data-parallel-sharding-strategy optim_grads_params --expert-model-parallel-size 4 """
TORCHTITAN = """[parallelism]
tensor_parallel_degree = 2
expert_parallel_degree = 4
[activation_checkpoint]
mode = "none"
[training]
local_batch_size = 1
"""
WANTED = UniformStrategy(
    tp_size=2, data_parallel=DataParallel.ZERO3, sequence_parallel=SequenceParallel.MEGATRON
)  # fmt: skip


@pytest.fixture(scope="module")
def question():
    return question_of(AdviseOptions(model="mixtral-8x7b", gpus="2x8:H200", batch=64))


def _read(text, question):
    return replace(reading_of(str(text), question.setting).plan, name="mine", gradient_reduction="deferred")


@pytest.mark.parametrize(("etp_size", "default"), [(1, "torchtitan"), (2, "megatron")])
def test_a_sharing_of_experts_is_read_alike_in_three_languages(question, tmp_path, etp_size, default):
    """Left out, ranks share the features of experts as those of the rest in Megatron-LM, and not in torchtitan."""
    experts = ExpertStrategy(ep_size=4, etp_size=etp_size, data_parallel=DataParallel.ZERO3)
    wanted = replace(question.setting.plan(WANTED, "mine"), name="mine")
    layers = tuple(replace(layer, experts=experts) for layer in wanted.layers)
    wanted = replace(wanted, layers=layers, gradient_reduction="deferred")
    named = {"": f"tp=2,ep=4,etp={etp_size},zero=3"} | ({"short": "tp=2,ep=4,zero=3"} if default == "megatron" else {})
    for text in named.values():
        assert _read(text, question) == wanted
    option = "" if default == "megatron" else f"--expert-tensor-parallel-size {etp_size}"
    assert _read(f"{MEGATRON} {option}".replace("\n", " "), question) == wanted
    degree = "" if default == "torchtitan" else f"expert_tensor_parallel_degree = {etp_size}\n"
    (tmp_path / "run.toml").write_text(TORCHTITAN.replace("[activation", f"{degree}[activation"))
    assert _read(tmp_path / "run.toml", question) == wanted


def test_experts_that_each_rank_has_a_share_of_are_those_of_any_layer(question):
    for text in ("tp=2,ep=1,zero=3", "tp=2,ep=1,etp=2,zero=3", "tp=2,zero=3"):
        assert reading_of(text, question.setting).plan.layers[0].expert_grid is None


def test_a_sharing_of_experts_has_a_price(question):
    whole, shared = (
        evaluate(reading_of(text, question.setting).plan, question.profiles).estimate
        for text in ("tp=2,zero=1", "tp=2,ep=8,etp=1,zero=1")
    )
    assert shared.memory_bytes < whole.memory_bytes
    assert shared.simulated_step_time_s != whole.simulated_step_time_s


@pytest.mark.parametrize(
    ("model", "text", "problem"),
    [
        ("mixtral-8x7b", "tp=2,ep=16", "ep_size 16 x etp_size 2 does not divide the 16 ranks of the stage"),
        ("mixtral-8x7b", "tp=1,ep=16", "ep_size 16 does not divide its 8 experts"),
        ("mixtral-8x7b", "tp=2,ep=4,sp=0", "split the sequence"),
        ("llama-2-7b", "tp=2,ep=4", "has no experts to share out: leave out ep and etp"),
        ("llama-2-7b", "--expert-model-parallel-size 2", "has no experts to share out"),
        (
            "mixtral-8x7b",
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --expert-model-parallel-size 8",
            "num_distributed_optimizer_instances beside experts that ranks share out is not priced: leave it at 1",
        ),
    ],
)
def test_what_cannot_share_experts_out_is_refused(model, text, problem):
    setting = question_of(AdviseOptions(model=model, gpus="2x8:H200", batch=64)).setting
    with pytest.raises(BadInput, match=problem):
        reading_of(text, setting)


@pytest.mark.parametrize(
    ("degrees", "problem"),
    [
        (
            "tensor_parallel_degree = 4\nexpert_tensor_parallel_degree = 2",
            "2 is neither 1 nor tensor_parallel_",
        ),
        ("tensor_parallel_degree = 8", "expert_parallel_degree 4 is no multiple of tensor_parallel_degree 8"),
        (
            "data_parallel_replicate_degree = 2",
            "data_parallel_replicate_degree beside",
        ),
    ],
)
def test_degrees_that_torchtitan_does_not_have_together_are_refused(question, tmp_path, degrees, problem):
    (tmp_path / "run.toml").write_text(f"[parallelism]\nexpert_parallel_degree = 4\n{degrees}\n")
    with pytest.raises(BadInput, match=problem):
        reading_of(str(tmp_path / "run.toml"), question.setting)
