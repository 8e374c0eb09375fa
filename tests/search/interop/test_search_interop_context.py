"""Context parallelism goes into other systems' files and comes back from them, or is refused with the reason."""

import re
from pathlib import Path

import pytest
from accepted_files import TAKEN, launch_file_taken_by_accelerate
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types import ContextParallel, Plan, Schedule
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import Question, priced_lengths, question_of
from shardwright_search.advise.targeted import best_for, started
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions, System
from shardwright_search.search import SearchAnswer
from shardwright_search.systems.exporting import contexts_of
from shardwright_search.systems.registry import SYSTEMS

OPTIONS = AdviseOptions(model="llama-3.1-8b", gpus="2x8:H100-SXM", batch=64, seq=4096, against=("cp=2", "cp=4"))
RING = ",context=ring"
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 16}


@pytest.fixture(scope="module")
def question() -> Question:
    return question_of(OPTIONS)


def chosen(question: Question, choice: str) -> Plan:
    return reading_of(choice, question.setting).plan


def read_back(system: System, plan: Plan, question: Question) -> Plan:
    """The plan that the system's own file stands for, which the system takes."""
    start, target = started(system, plan), SYSTEMS[system]
    text = start.files[target.file_name]
    TAKEN[system](text)
    if system is System.ACCELERATE:
        launch_file_taken_by_accelerate(start.files["accelerate.json"])
    assert target.is_its_file(Path(target.file_name), text)
    return target.read(text, target.file_name, question.setting).plan


def same_price(one: Plan, other: Plan, question: Question) -> bool:
    here, there = (evaluate(plan, question.profiles, timeline=False).estimate for plan in (one, other))
    return here.simulated_step_time_s == there.simulated_step_time_s and here.memory_bytes == there.memory_bytes


@pytest.mark.parametrize(
    ("system", "choice"),
    [
        (System.MEGATRON, "tp=2,cp=2,pp=2,mbs=1,zero=1"),
        (System.MEGATRON, f"cp=4,mbs=2{RING}"),
        (System.MEGATRON, f"cp=4,pp=4,mbs=1,zero=1,recompute=full{RING}"),
        (System.MEGATRON, f"cp=2,tp=2,zero=3{RING}"),
        (System.MEGATRON_BRIDGE, f"tp=2,cp=2,pp=2,mbs=1,zero=1{RING}"),
        (System.TORCHTITAN, "tp=2,cp=2,mbs=1,zero=3"),
        (System.TORCHTITAN, f"cp=4,tp=4,zero=3,recompute=full{RING}"),
        (System.TORCHTITAN, f"cp=2,pp=4,mbs=1,zero=1{RING}"),
        (System.ACCELERATE, "cp=2,zero=3,recompute=full"),
        (System.ACCELERATE, f"cp=4,zero=1{RING}"),
        (System.GALVATRON, f"tp=2,cp=2,pp=2,mbs=1,zero=1{RING}"),
    ],
)
def test_what_is_written_is_taken_and_read_back_as_the_same_plan(
    question: Question, system: System, choice: str
) -> None:
    plan = chosen(question, choice)
    assert any(layer.cp_size > 1 for layer in plan.layers)
    back = read_back(system, plan, question)
    assert {(s.cp_size, s.dp_size, s.data_parallel) for s in (*back.layers, back.head)} == {
        (s.cp_size, s.dp_size, s.data_parallel) for s in (*plan.layers, plan.head)
    }
    assert {layer.context for layer in back.layers} == {layer.context for layer in plan.layers}
    assert same_price(plan, back, question)


@pytest.mark.parametrize(("system", "groups"), [(System.MEGATRON, 2), (System.TORCHTITAN, 2), (System.ACCELERATE, 2)])
def test_groups_of_shards_are_of_data_and_context_parallel_ranks(
    question: Question, system: System, groups: int
) -> None:
    """16 ranks of dp 8 x cp 2 share states out in two groups of 8, which hold 4 data-parallel ranks each."""
    each = chosen(question, "cp=2,zero=1" if system is System.MEGATRON else "cp=2,zero=3")
    shared = {"shard_size": 16 // groups}
    plan = replace(
        each,
        embedding=replace(each.embedding, **shared),
        head=replace(each.head, **shared),
        layers=tuple(replace(layer, **shared) for layer in each.layers),
    )
    text = SYSTEMS[system].export(plan, "plan.json").text
    if system is not System.MEGATRON:
        assert re.search(r"data_parallel_replicate_degree = 2|dp_replicate_size=2", text)
        assert re.search(r"data_parallel_shard_degree = 4|dp_shard_size=4", text)
    back = read_back(system, plan, question)
    assert {layer.shard_size for layer in back.layers} == {8}
    assert same_price(plan, back, question)


def test_each_layer_of_galvatrons_has_a_degree(question: Question) -> None:
    plan = chosen(question, f"cp=4,mbs=4,zero=1{RING}")
    whole = {"cp_size": 1, "dp_size": 16, "context": ContextParallel.GATHER}
    layers = tuple(replace(layer, **whole) if i % 2 else layer for i, layer in enumerate(plan.layers))
    mixed = replace(plan, layers=layers)
    text = SYSTEMS[System.GALVATRON].export(mixed, "plan.json").text
    assert '"cp_sizes_enc": "4,1,4,1' in text and '"vcp": 4' in text
    assert read_back(System.GALVATRON, mixed, question).layers == layers


@pytest.mark.parametrize(
    ("system", "choice", "refused"),
    [
        (System.DEEPSPEED, "cp=2,zero=1", "DeepSpeed cannot express embedding: cp_size above 1"),
        (System.GALVATRON, "cp=2,zero=1", r"Galvatron cannot express layers\[0\]: context gather: choose ring"),
        (System.TORCHTITAN, "cp=2,zero=0", "torchtitan cannot express embedding: ddp beside context parallelism"),
        (System.ACCELERATE, "tp=2,cp=2,zero=3", r"accelerate cannot express layers\[0\]: tp_size 2"),
        (System.ACCELERATE, "cp=2,zero=0", r"accelerate cannot express layers\[0\]: ddp: choose zero2 or zero3"),
    ],
)
def test_what_a_system_does_not_have_is_refused(question: Question, system: System, choice: str, refused: str) -> None:
    with pytest.raises(BadInput, match=refused):
        SYSTEMS[system].export(chosen(question, choice), "plan.json")


def test_embedding_and_head_share_positions_out_as_layers_do(question: Question) -> None:
    plan = chosen(question, "cp=2,mbs=2,zero=1")
    odd = replace(plan, head=replace(plan.head, cp_size=1, dp_size=16))
    with pytest.raises(BadInput, match=r"head: cp_size 1, where layers\[0\] has 2"):
        SYSTEMS[System.MEGATRON].export(odd, "plan.json")


def test_masks_that_other_systems_do_not_share_out_are_refused() -> None:
    asked = question_of(replace(OPTIONS, model="bert-large", seq=512, against=("cp=2",)))
    masked = r"cp_size 2 \(context ring adds no padding to scores, as bert models do\)"
    with pytest.raises(BadInput, match=rf"torchtitan cannot express layers\[0\]: {masked}: choose cp_size 1"):
        SYSTEMS[System.TORCHTITAN].export(chosen(asked, "cp=2,zero=3"), "plan.json")
    windowed = {**CONFIG, "model_type": "mistral", "sliding_window": 8}
    for config, dropping in ((windowed, True), (windowed, False), ({**GPT2, "attn_pdrop": 0.1}, False)):
        assert contexts_of(model_of_config(config, "m", 16, "config.json"), dropping) == ()
    for config, dropping in ((CONFIG, False), ({**GPT2, "attn_pdrop": 0.1}, True)):
        assert contexts_of(model_of_config(config, "m", 16, "config.json"), dropping) == tuple(ContextParallel)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("--against", ()),
        ("--tensor-model-parallel-size 2 --context-parallel-size 4", (1024,)),
        ("--context-parallel-size=2", (2048,)),
    ],
)
def test_arguments_with_a_degree_are_priced_at_its_shares(text: str, sizes: tuple[int, ...]) -> None:
    assert priced_lengths(4096, (1,), (text,)) == sizes


@pytest.mark.parametrize("system", [System.MEGATRON, System.TORCHTITAN, System.ACCELERATE, System.GALVATRON])
def test_files_with_a_degree_are_priced_at_its_shares(question: Question, system: System, tmp_path: Path) -> None:
    plan = chosen(question, f"cp=4,zero=1{RING}" if system is System.GALVATRON else "cp=4,pp=1,mbs=4,zero=1")
    path = tmp_path / SYSTEMS[system].file_name
    path.write_text(SYSTEMS[system].export(replace(plan, num_microbatches=1), "plan.json").text)
    assert priced_lengths(4096, (1,), (str(path),)) == (1024,)


def test_too_few_long_samples_are_shared_out_where_the_system_can(tmp_path: Path) -> None:
    """accelerate runs no tensor parallelism beside FSDP2 here: 8 samples keep 16 GPUs busy by cp alone."""
    asked = question_of(replace(OPTIONS, model="llama-3.2-1b", batch=8, seq=16384, against=()))
    answer = best_for(System.ACCELERATE, asked, lambda _: None, 20.0)
    assert isinstance(answer, SearchAnswer) and not answer.stopped
    plan = answer.chosen.plan
    assert {layer.cp_size for layer in plan.layers} == {2} and plan.schedule is Schedule.ONE_F_ONE_B
    assert same_price(plan, read_back(System.ACCELERATE, plan, asked), asked)
