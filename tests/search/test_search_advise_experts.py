"""Choices that share experts out, read from three languages, and priced."""

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput, write_document
from shardwright.types import DataParallel, ExpertLoad, ExpertStrategy, LayerLoad, SequenceParallel
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions

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
WANTED = {"tp_size": 2, "data_parallel": DataParallel.ZERO3, "sequence_parallel": SequenceParallel.MEGATRON}


@pytest.fixture(scope="module")
def question():
    return question_of(AdviseOptions(model="mixtral-8x7b", gpus="2x8:H200", batch=64))


def _read(text, question):
    return replace(reading_of(str(text), question.setting).plan, name="mine", gradient_reduction="deferred")


@pytest.mark.parametrize(("etp_size", "default"), [(1, "torchtitan"), (2, "megatron")])
def test_a_sharing_of_experts_is_read_alike_in_three_languages(question, tmp_path, etp_size, default):
    """Left out, ranks share the features of experts as those of the rest in Megatron-LM, and not in torchtitan."""
    experts = ExpertStrategy(ep_size=4, etp_size=etp_size, data_parallel=DataParallel.ZERO3)
    wanted = question.setting.plan(question.setting.uniform("mine", 1, **WANTED), "mine")
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
        ("llama-2-7b", "tp=2,ep=4", "has no experts to shard: leave out ep and etp"),
        ("llama-2-7b", "--expert-model-parallel-size 2", "has no experts to shard"),
        (
            "mixtral-8x7b",
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --expert-model-parallel-size 8",
            "num_distributed_optimizer_instances with expert parallelism is not priced: leave it at 1",
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
        ("tensor_parallel_degree = 8", "expert_parallel_degree 4 is not a multiple of tensor_parallel_degree 8"),
        (
            "data_parallel_replicate_degree = 2",
            "data_parallel_replicate_degree with",
        ),
    ],
)
def test_degrees_that_torchtitan_does_not_have_together_are_refused(question, tmp_path, degrees, problem):
    (tmp_path / "run.toml").write_text(f"[parallelism]\nexpert_parallel_degree = 4\n{degrees}\n")
    with pytest.raises(BadInput, match=problem):
        reading_of(str(tmp_path / "run.toml"), question.setting)


def test_a_load_of_experts_raises_the_price_of_plans_that_share_them_out(question, tmp_path):
    options = AdviseOptions(model="mixtral-8x7b", gpus="2x8:H200", batch=64)
    shares = (LayerLoad(layer=i, shares=(0.3, *[0.1] * 7)) for i in range(32))
    load = ExpertLoad(model="mixtral-8x7b", first_step=1, last_step=9, layers=tuple(shares))
    write_document(tmp_path / "load.json", load)
    steps_s = {}
    for imbalance in (None, "1", "2.4", str(tmp_path / "load.json")):
        asked = question_of(replace(options, imbalance=imbalance))
        for text in ("tp=2,ep=8,etp=1,zero=1", "tp=2,zero=1"):
            priced = evaluate(reading_of(text, asked.setting).plan, asked.profiles)
            steps_s[imbalance, text] = priced.estimate.simulated_step_time_s
            told = any("up to 2.4 times the mean rank's positions" in line for line in priced.warnings)
            assert told == (imbalance == "2.4" and "ep=8" in text)
        logged = any(line == f"experts get positions as in {imbalance} (--imbalance)" for line in asked.assumed)
        assert logged == str(imbalance).endswith(".json")
    for text in ("tp=2,ep=8,etp=1,zero=1", "tp=2,zero=1"):
        even, one, uneven, logged = (steps_s[imbalance, text] for imbalance in dict.fromkeys(key[0] for key in steps_s))
        assert even == one and (uneven > even) == (logged > even) == ("ep=8" in text)
    with pytest.raises(BadInput, match=r"load\.json: does not fit: "):
        other = question_of(replace(options, model="qwen3-30b-a3b", imbalance=str(tmp_path / "load.json")))
        evaluate(reading_of("tp=2", other.setting).plan, other.profiles)
