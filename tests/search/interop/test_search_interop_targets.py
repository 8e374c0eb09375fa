"""Plans that are searched for another system: its parser takes them, and read back they take the same time."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from accepted_files import TAKEN, launch_file_taken_by_accelerate
from msgspec import UNSET

from shardwright.command.command_line import _exit_code
from shardwright.io import BadInput
from shardwright.types import EMBEDDING, HEAD
from shardwright_search.advise.question import question_of
from shardwright_search.advise.targeted import best_for, started
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions, System
from shardwright_search.space.budget import Infeasible
from shardwright_search.systems.registry import SYSTEMS

WORLDS = (
    ("llama-3-8b", "2x8:H100-SXM", 256),
    ("qwen2.5-0.5b", "1x4:A100-40", 64),
    ("llama-2-7b", "1x8:A100-80", 128),
    ("llama-3-70b", "8x8:H100-SXM", 512),
    ("llama-3.2-1b", "1x8:A100-40", 64),
    ("llama-3.2-3b", "2x4:A100-80", 96),
    ("mistral-7b", "2x8:A100-40", 64),
    ("qwen2.5-1.5b", "1x8:H100-SXM", 64),
    ("qwen2.5-3b", "4x8:A100-40", 128),
    ("qwen2.5-7b", "2x8:H200", 256),
    ("qwen2.5-14b", "4x8:H100-SXM", 256),
    ("qwen2.5-32b", "8x8:A100-80", 512),
    ("qwen3-0.6b", "1x2:H100-SXM", 32),
    ("qwen3-1.7b", "1x8:B200", 64),
    ("qwen3-4b", "2x8:A100-80", 128),
    ("qwen3-8b", "2x8:H100-SXM", 64),
    ("qwen3-14b", "4x8:H200", 256),
    ("gpt2-xl", "1x8:A100-40", 64),
    ("llama-3.1-8b", "4x8:A100-80", 128),
    ("llama-2-70b", "8x8:H200", 256),
)
"""Models, GPUs and batches; few of them are searched in `make test`."""
WITH_EXPERTS = (
    ("mixtral-8x7b", "4x8:H100-SXM", 256, (System.MEGATRON, System.TORCHTITAN)),
    ("qwen3-30b-a3b", "2x8:H100-SXM", 256, (System.MEGATRON, System.MEGATRON_BRIDGE, System.TORCHTITAN)),
    ("deepseek-v2-lite", "2x8:A100-80", 128, (System.MEGATRON, System.MEGATRON_BRIDGE, System.TORCHTITAN)),
    ("deepseek-v3", "128x8:H100-SXM", 2048, (System.MEGATRON, System.MEGATRON_BRIDGE, System.TORCHTITAN)),
    ("llama-4-scout", "16x8:H100-SXM", 512, (System.TORCHTITAN,)),
    ("gpt-oss-20b", "2x8:H100-SXM", 128, (System.TORCHTITAN,)),
)
"""Models whose layers may have experts, and systems that run them."""


def _cases():
    for number, world in enumerate(WORLDS):
        for system in SYSTEMS:
            if system is System.MEGATRON_BRIDGE and world[0].startswith("gpt2"):
                continue  # it has no bridge
            yield pytest.param(system, *world, marks=[pytest.mark.long] if number > 1 else [])
    for *world, systems in WITH_EXPERTS:
        yield from (pytest.param(system, *world, marks=pytest.mark.long) for system in systems)


@pytest.mark.parametrize(("system", "model", "gpus", "batch"), list(_cases()))
def test_what_is_written_is_taken_there_and_takes_the_same_time_read_back(system, model, gpus, batch):
    question = question_of(AdviseOptions(model=model, gpus=gpus, batch=batch, seq=1024))
    answer = best_for(system, question, lambda _: None, 6.0)
    if isinstance(answer, Infeasible):  # ZeRO without tensor parallelism or a pipeline
        assert system in (System.DEEPSPEED, System.ACCELERATE) and answer.missing_bytes > 0
        return
    _taken_and_read_back(system, question, answer)
    assert 0 < answer.bound_s <= answer.optimum_s or answer.stopped


DENSE_FIRST = {
    "model_type": "deepseek_v3", "vocab_size": 32_000, "hidden_size": 2_048, "intermediate_size": 8_192,
    "moe_intermediate_size": 2_048, "num_hidden_layers": 14, "first_k_dense_replace": 2, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "max_position_embeddings": 4_096,
}  # fmt: skip
"""Two layers without experts before twelve that have some."""


@pytest.mark.parametrize("system", [System.MEGATRON, System.TORCHTITAN])
def test_layers_without_experts_beside_such_that_have_some_share_a_strategy_but_for_these(system, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(DENSE_FIRST))
    question = question_of(AdviseOptions(model=str(config), gpus="8:H100-SXM", batch=64, seq=1024))
    answer = best_for(system, question, lambda _: None, 20.0)
    _taken_and_read_back(system, question, answer)
    plans = [each.plan for each in (answer.chosen, *answer.runners_up)]
    shared = {layer.experts for plan in plans for layer in plan.layers if layer.type == "sparse"}
    assert any(each is not UNSET and each.ep_size > 1 for each in shared)
    assert all(layer.experts is UNSET for plan in plans for layer in plan.layers if layer.type == "dense")
    assert len({msgspec.structs.replace(x, type="", experts=UNSET) for x in answer.chosen.plan.layers}) == 1


def _taken_and_read_back(system, question, answer):
    """The system's parser takes all plans of an answer, which take the same time read back."""
    for candidate in (answer.chosen, *answer.runners_up):
        start, target = started(system, candidate.plan), SYSTEMS[system]
        text = start.files[target.file_name]
        TAKEN[system](text)
        if system is System.ACCELERATE:
            launch_file_taken_by_accelerate(start.files["accelerate.json"])
        assert target.file_name in start.command
        assert target.is_its_file(Path(target.file_name), text)
        plan = target.read(text, target.file_name, question.setting).plan
        here, there = (evaluate(each, question.profiles).estimate for each in (candidate.plan, plan))
        assert there.simulated_step_time_s == here.simulated_step_time_s
        assert there.memory_bytes == here.memory_bytes


def test_embedding_and_head_are_as_the_system_has_them():
    """Without a limit the head of this model is sharded otherwise than its layers."""
    question = question_of(AdviseOptions(model="llama-3-8b", gpus="2x8:H100-SXM", batch=256))
    for system in (System.MEGATRON, System.TORCHTITAN):
        plan = best_for(system, question, lambda _: None, 20.0).chosen.plan
        layers = {msgspec.structs.replace(layer, type="") for layer in plan.layers}
        (layer,) = layers
        for name, strategy in ((EMBEDDING, plan.embedding), (HEAD, plan.head)):
            shared = {field: getattr(layer, field) for field in type(strategy).__struct_fields__}
            assert shared == msgspec.structs.asdict(strategy), name


@pytest.mark.parametrize(
    ("system", "model", "types"),
    [
        (System.TORCHTITAN, "t5-3b", "encoder, decoder"),
        (System.ACCELERATE, "gpt-oss-20b", "sliding_attention, full_attention"),
        (System.DEEPSPEED, "gpt-oss-20b", "sliding_attention, full_attention"),
    ],
)
def test_models_that_no_system_with_one_strategy_runs_are_refused_in_one_line(system, model, types):
    question = question_of(AdviseOptions(model=model, gpus="8:H100-SXM", batch=64))
    problem = f"--for {system}: .* needs layers of one type, .*; {model} has {types}: choose"
    with pytest.raises(BadInput, match=problem):
        best_for(system, question, lambda _: None, 5.0)


def test_more_gpus_than_layers_have_no_pipeline_of_more_stages(tmp_path):
    config, sizes = tmp_path / "config.json", {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2048}
    config.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 16, "vocab_size": 32_000, **sizes}))
    question = question_of(AdviseOptions(model=str(config), gpus="2x8:H100-SXM", batch=64, seq=1024))
    answer = best_for(System.TORCHTITAN, question, lambda _: None, 20.0)
    assert 1 <= len(answer.chosen.plan.stages) <= 12


def test_advice_for_a_system_starts_there_and_export_takes_another_choice(tmp_path, capsys):
    """The first answer says what is proven and what the limits cost; the folder's file is what --against reads."""
    folder, plan, asked = tmp_path / "start", tmp_path / "plan.json", ("llama-3.2-1b", "--gpus", "1x8:A100-80")
    options = ("--batch", "64", "--seq", "1024", "--time-limit", "60")
    words = (*asked, *options, "--for", "megatron", "--launch", str(folder), "--out", str(plan))
    assert _exit_code(APP, ["advise", *words, "--take", "runner-up:1"]) == 0
    told = capsys.readouterr().out
    for said in (
        "proven optimal within what Megatron-LM runs",
        "the limits of Megatron-LM cost",
        "torchrun --nnodes 1",
    ):
        assert said in told
    assert {"args.txt", "node.sh", "nodes.txt"} <= {path.name for path in folder.iterdir()}
    assert _exit_code(APP, ["export", str(plan), "--to", "megatron", "--out", str(tmp_path / "again.txt")]) == 0
    assert (tmp_path / "again.txt").read_text() == (folder / "args.txt").read_text()
    to = ("--to", "torchtitan", "--out", str(tmp_path / "run.toml"))
    assert _exit_code(APP, ["export", str(plan), *to, "--against", "tp=2,mbs=2,zero=3"]) == 0
    assert tomllib.loads((tmp_path / "run.toml").read_text())["parallelism"]["tensor_parallel_degree"] == 2
    capsys.readouterr()
    assert _exit_code(APP, ["advise", *asked, *options, "--launch", str(folder)]) == 2
    assert "start: is not empty: choose a new folder" in capsys.readouterr().err
