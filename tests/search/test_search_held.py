"""What runtimes hold in memory: counted alike by search and `evaluate`, and near what others measured."""

import dataclasses
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from random_requests import FILE, random_world
from test_search_consistency import differences, interleaved_world

from shardwright.command.command_line import _exit_code
from shardwright.devices.table import read_devices
from shardwright.estimate.held import BY_MEGATRON_CORE, BY_NANOTRON, LIGHT, Module
from shardwright.estimate.notes import EXPANDABLE
from shardwright.estimate.runtimes import RuntimeName
from shardwright.io import BadInput
from shardwright.models.adapter_config import read_adapter
from shardwright.plan.supported_fields import check_fields
from shardwright.types import (
    GIB,
    DataParallel,
    ExpertStrategy,
    GradientReduction,
    LayerStrategy,
    Precision,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_search.advise.question import question_of
from shardwright_search.advise.report import verdict
from shardwright_search.cli import APP
from shardwright_search.cost_model.parameters import parameter_memory
from shardwright_search.cost_model.plan import evaluate, kept_if_it_fits
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.options import AdviseOptions, System
from shardwright_search.search import SearchAnswer, find_best

MIXED = Precision(compute="bfloat16")
ADAPTER = '{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}'


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(ADAPTER)
    read_adapter(tmp_path)
    return tmp_path


def priced(options, chunks=1, pp_size=1, micro_batch_size=1, **of_layer):
    """A uniform plan of a question, and its estimate."""
    question = question_of(options)
    every = GradientReduction.EVERY_MICROBATCH if options.target else GradientReduction.DEFERRED
    choice = question.setting.uniform("mine", pp_size, micro_batch_size, every, **of_layer)._replace(chunks=chunks)
    plan = question.setting.plan(choice, "mine")
    return plan, evaluate(plan, question.profiles, timeline=False).estimate


def tensors_gib(estimate):
    """What the fullest rank holds but for its process and communicators."""
    return (
        max(
            stage.memory_bytes - stage.memory_terms_bytes["process"] - stage.memory_terms_bytes.get("communicators", 0)
            for stage in estimate.stages
        )
        / GIB
    )


@pytest.mark.parametrize("habits", [BY_MEGATRON_CORE, BY_NANOTRON])
def test_plans_under_other_runtimes_cost_the_same_to_the_solver_and_to_evaluate(habits):
    for seed in range(6):
        world = random_world(seed)
        other = world._replace(profiles=world.profiles._replace(held=habits))
        assert differences(other, seed) == [], seed


def test_a_search_under_another_runtime_keeps_to_the_budget_that_evaluate_sees():
    for seed in range(1000, 1004):
        world = interleaved_world(seed)
        profiles = world.profiles._replace(held=BY_MEGATRON_CORE, memory_factor=1.03)
        given = world.model, world.cluster, profiles, FILE, lambda line: None
        answer = find_best(world.request, *given)
        assert isinstance(answer, SearchAnswer)
        need = evaluate(answer.chosen.plan, profiles).estimate.memory_bytes
        assert need == answer.chosen.evaluation.estimate.memory_bytes
        # Terms are rounded up one by one, which the budget of a search allows for.
        tight = find_best(replace(world.request, memory_gib=(need + 64) / GIB), *given)
        assert isinstance(tight, SearchAnswer), "it still fits what it needs"
        assert tight.chosen.evaluation.estimate.memory_bytes <= need + 64
        assert tight.optimum_s <= answer.chosen.evaluation.estimate.objective_s * (1 + 1e-9)


def test_a_contiguous_buffer_holds_all_gradients_whatever_shards_them(make):
    block = make.model().types["block"]
    zero2 = Strategy(tp_size=1, dp_size=4, data_parallel=DataParallel.ZERO2)
    for deferred in (False, True):
        ours = parameter_memory(block, zero2, MIXED, deferred=deferred)
        megatron = parameter_memory(block, zero2, MIXED, deferred=deferred, held=BY_MEGATRON_CORE)
        nanotron = parameter_memory(block, zero2, MIXED, deferred=deferred, held=BY_NANOTRON)
        numel = block.trained_count()
        assert (megatron.gradient_buffer, nanotron.gradient_buffer) == (4 * numel, (4 + 2) * numel)
        assert megatron.gradients == megatron.buffers == megatron.unreduced_gradients == ours.gradient_buffer == 0
        assert (megatron.parameters, megatron.optimizer) == (ours.parameters, ours.optimizer)


@pytest.mark.parametrize("system", [System.ACCELERATE, System.DEEPSPEED])
def test_transformers_loss_holds_12_bytes_a_logit(system):
    asked = AdviseOptions(model="llama-3-8b", gpus="1x8:A100-80", batch=64, seq=8192, target=system)
    layer = {"data_parallel": DataParallel.ZERO2, "recompute": Recompute.FULL}
    many = tensors_gib(priced(asked, micro_batch_size=8, **layer)[1])
    ours = tensors_gib(priced(replace(asked, runtime=RuntimeName.SHARDWRIGHT), micro_batch_size=8, **layer)[1])
    logits = 8 * 8192 * 128256
    # All but some GiB that the backward pass of a block takes where it has no logits.
    assert 1.03 * (ours + 10 * logits / GIB) == pytest.approx(many, rel=0.04)
    assert many > 140, "it cannot run on 80 GiB"
    few = priced(asked, micro_batch_size=2, **layer)[1]
    assert few.memory_bytes < 80 * GIB


@pytest.mark.parametrize(
    ("runtime", "gpus", "batch", "of_layer", "compiled", "measured_gib"),
    [
        # pytorch/torchtitan#1690: peaks of reserved memory of Qwen3 32B, full recomputation
        ("torchtitan", "1x8:H100-SXM", 16, {"micro_batch_size": 2}, True, 81.85),
        ("torchtitan", "4x8:H100-SXM", 64, {"tp_size": 8, "micro_batch_size": 16}, False, 43.45),
        ("torchtitan", "4x8:H100-SXM", 128, {"tp_size": 8, "micro_batch_size": 32}, False, 70.79),
    ],
)
def test_torchtitan_holds_what_it_was_seen_to_hold(runtime, gpus, batch, of_layer, compiled, measured_gib):
    options = AdviseOptions(
        model="qwen3-32b", gpus=gpus, batch=batch, seq=4096, runtime=RuntimeName(runtime), compile=compiled
    )
    kind = SequenceParallel.MEGATRON if "tp_size" in of_layer else SequenceParallel.NONE
    layer = of_layer | {
        "data_parallel": DataParallel.ZERO3,
        "recompute": Recompute.FULL,
        "sequence_parallel": kind,
    }
    assert tensors_gib(priced(options, **layer)[1]) == pytest.approx(measured_gib, rel=0.06)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "measured_gib"), [(4, 4, 58.8), (4, 8, 53.2), (8, 4, 50.2)], ids=["tp4pp4", "pp8", "tp8"]
)
def test_llama_3_70b_in_fp8_under_megatron_is_near_its_measured_peaks(tp_size, pp_size, measured_gib):
    # skills/nemo-mbridge-perf-memory-tuning of NVIDIA-NeMo/Megatron-Bridge 067f987
    options = AdviseOptions(
        model="llama-3-70b",
        gpus="4x8:H100-SXM",
        batch=32,
        seq=4096,
        runtime=RuntimeName.MEGATRON_CORE,
        precision="fp8",
        reduce="bfloat16",
    )
    layer = {"data_parallel": DataParallel.ZERO2, "sequence_parallel": SequenceParallel.MEGATRON}
    _, estimate = priced(options, chunks=5, pp_size=pp_size, tp_size=tp_size, **layer)
    # 82.8 GiB were said of the first; peaks are of what is allocated, not reserved.
    assert tensors_gib(estimate) / 1.03 == pytest.approx(measured_gib, rel=0.12)
    assert estimate.memory_bytes < 70 * GIB
    in_bf16 = priced(replace(options, precision="bfloat16"), chunks=5, pp_size=pp_size, tp_size=tp_size, **layer)
    assert in_bf16[1].memory_bytes > estimate.memory_bytes, "inputs of products take two bytes there"


@pytest.mark.parametrize("ep_size", [1, 8])
def test_light_recomputation_is_that_of_its_modules(ep_size):
    """Of a model with latents and experts, in time and memory; experts' exchanges are as without it."""
    gpus = f"1x{ep_size}:H100-SXM"
    asked = {"model": "deepseek-v2-lite", "gpus": gpus, "batch": ep_size, "seq": 4096}
    options = AdviseOptions(**asked, runtime=RuntimeName.MEGATRON_CORE)
    experts = {"experts": ExpertStrategy(ep_size=8, etp_size=1, data_parallel=DataParallel.DDP)} if ep_size > 1 else {}
    plain, light = (priced(options, recompute=kind, **experts)[1] for kind in (Recompute.NONE, Recompute.LIGHT))
    modules = priced(replace(options, recompute_modules=LIGHT), **experts)[1]
    assert light == modules
    assert (light.memory_bytes, light.simulated_step_time_s) != (plain.memory_bytes, plain.simulated_step_time_s)


@pytest.mark.parametrize("ep_size", [1, 8])
def test_modules_that_are_recomputed_by_themselves_leave_memory_and_take_time(ep_size):
    gpus = f"1x{ep_size}:H100-SXM"
    asked = {"model": "deepseek-v2-lite", "gpus": gpus, "batch": ep_size, "seq": 4096, "launch_us": 0}
    options = AdviseOptions(**asked, runtime=RuntimeName.MEGATRON_CORE)
    experts = {"experts": ExpertStrategy(ep_size=8, etp_size=1, data_parallel=DataParallel.DDP)} if ep_size > 1 else {}
    plain = priced(options, **experts)[1]
    without = plain.memory_bytes
    found = {module: priced(replace(options, recompute_modules=(module,)), **experts)[1] for module in Module}
    held = {module: estimate.memory_bytes for module, estimate in found.items()}
    longer_s = {module: each.simulated_step_time_s - plain.simulated_step_time_s for module, each in found.items()}
    # 26 blocks' products of 4,096 positions with 512 x 16 x 256 and 2,048 x 16 x 192 matrices, at 795 TFLOP/s.
    products_s = 26 * 2 * 4096 * (512 * 16 * 256 + 2048 * 16 * 192) / 795e12
    assert products_s < longer_s[Module.MLA_UP_PROJ] < 2.1 * products_s
    assert 0 < longer_s[Module.MOE_ACT] < longer_s[Module.MOE] and longer_s[Module.LAYERNORM] > 0
    assert held[Module.CORE_ATTN] == without, "a flash kernel keeps no scores"
    assert max(held[each] for each in Module if each is not Module.CORE_ATTN) < without
    assert held[Module.MOE] < held[Module.MOE_ACT]


def test_low_rank_matrices_beside_a_base_in_bfloat16_fit_one_card(adapter):
    asked = {"model": "llama-3.1-8b", "gpus": "1x1:L40S", "batch": 2, "seq": 2048, "lora": adapter}
    question = question_of(AdviseOptions(**asked))
    assert question.request.precision == Precision(parameters="bfloat16", compute="bfloat16", reduce="bfloat16")
    assert any("--parameters" in line for line in question.assumed)
    recomputed = priced(AdviseOptions(**asked), micro_batch_size=2, recompute=Recompute.FULL)[1]
    # torchtune's README: 16.2 GiB with recomputation and a loss in chunks.
    assert tensors_gib(recomputed) == pytest.approx(16.2, rel=0.08)
    stored = priced(AdviseOptions(**asked, parameters="float32"))[1].stages[0].memory_terms_bytes["parameters"]
    assert stored == pytest.approx(2 * recomputed.stages[0].memory_terms_bytes["parameters"], rel=1e-6)
    # The same without either, in compiled blocks, as all of that table. It does not say which matrices were adapted:
    # recipes of its time have all, whose inputs are kept, or attention's alone.
    compiled = tensors_gib(priced(AdviseOptions(**asked, compile=True), micro_batch_size=2)[1])
    attention = json.loads(ADAPTER) | {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(attention))
    fewer = tensors_gib(priced(AdviseOptions(**asked, compile=True), micro_batch_size=2)[1])
    assert fewer < 30.3 < compiled
    assert fewer == pytest.approx(30.3, rel=0.06) and compiled == pytest.approx(30.3, rel=0.11)


def test_a_base_in_few_bits_holds_its_blocks_in_them_and_is_not_trained_here(adapter):
    asked = {"model": "llama-3.1-8b", "gpus": "1x1:RTX-4090", "batch": 2, "seq": 2048, "lora": adapter}
    plain, few = (priced(AdviseOptions(**asked, **more)) for more in ({}, {"base": "4bit"}))
    kept, quantized = (found[1].stages[0].memory_terms_bytes["parameters"] for found in (plain, few))
    model = plain[0].model
    blocks = sum(
        p.numel(1) for name in model.layers for p in model.types[name].parameters if not p.trained and len(p.shape) > 1
    )
    assert kept - quantized == pytest.approx(blocks * (16 - 4.127) / 8, rel=1e-6)
    with pytest.raises(BadInput, match=r"precision.base: the runtime does not support it"):
        check_fields(few[0], "plan.json", "the runtime")
    with pytest.raises(BadInput, match="but all are trained"):
        question_of(AdviseOptions(model="llama-3.1-8b", gpus="1x8:H100-SXM", base="4bit"))


def test_a_verdict_is_a_range_and_a_plan_near_the_limit_names_the_allocator_s_setting():
    asked = AdviseOptions(model="llama-3-8b", gpus="1x8:A100-80", batch=64, seq=8192, target=System.ACCELERATE)
    layer = {"data_parallel": DataParallel.ZERO2, "recompute": Recompute.FULL}
    roomy, close = (verdict_of(asked, micro_batch_size=size, **layer) for size in (1, 2))
    assert roomy.startswith("fits: ") and EXPANDABLE not in roomy and " of 80 GiB a GPU, " in roomy
    assert close.startswith("near the limit: ") and close.endswith(f"set {EXPANDABLE}"), close


def verdict_of(options, **of_plan):
    """The verdict on a uniform plan of a question."""
    return verdict(*priced(options, **of_plan), question_of(options).profiles)


def test_what_fits_no_usual_budget_is_searched_in_all_of_the_memory(monkeypatch, capsys):
    asked = AdviseOptions(model="llama-2-7b", gpus="1x1:H100-SXM", batch=1, seq=512)
    need = priced(asked, recompute=Recompute.FULL)[1].memory_bytes
    known = read_devices()
    small = replace(known.devices["H100-SXM"], memory_bytes=round(need * 1.02))
    table = replace(known, devices=known.devices | {"H100-SXM": small})
    monkeypatch.setattr("shardwright_search.advise.question.read_devices", lambda: table)
    words = "advise", "llama-2-7b", "--gpus", "1x1:H100-SXM", "--batch", "1", "--seq", "512"
    assert _exit_code(APP, [*words]) == 0
    assert "batch 1: near the limit, beyond the usual budget: " in capsys.readouterr().out
    assert _exit_code(APP, [*words, "--budget-gib", f"{need / GIB * 0.9:.2f}"]) == 3, "a budget that is given holds"


def test_profiles_of_a_runtime_that_nobody_knows_are_refused(tmp_path, make):
    model, cluster = make.model(), make.cluster(2)
    profile = make.profile(model)
    odd = dataclasses.replace(profile, origin=replace(profile.origin, runtime="made-up"))
    with pytest.raises(BadInput, match="'made-up'"):
        index_profiles(make.hardware(cluster), Path("h.h5"), odd, Path("m.h5"))


def test_a_layer_strategy_without_gathers_is_never_reclaimed():
    asked = {"model": "llama-2-7b", "gpus": "1x8:H100-SXM", "batch": 8, "seq": 1024}
    options = AdviseOptions(**asked, runtime=RuntimeName.NANOTRON)
    question = question_of(options)
    plan, _ = priced(options)
    assert kept_if_it_fits(plan, question.profiles) == (0,)
    split, _ = priced(options, tp_size=8, sequence_parallel=SequenceParallel.MEGATRON)
    (kept,) = kept_if_it_fits(split, question.profiles)
    assert kept == 2 * 32 * 1024 * 4096 * 2 * 7 // 8 and isinstance(split.layers[0], LayerStrategy)


def test_a_verdict_counts_inputs_that_an_allocator_keeps_while_there_is_room():
    """nanotron keeps both gathered inputs of 32 blocks: 3.5 GiB of 8 samples beyond what the plan needs."""
    asked = {"model": "llama-2-7b", "gpus": "1x8:H100-SXM", "batch": 64, "seq": 1024, "runtime": RuntimeName.NANOTRON}
    split = {"tp_size": 8, "sequence_parallel": SequenceParallel.MEGATRON, "micro_batch_size": 8}
    options = AdviseOptions(**asked)
    plan, estimate = priced(options, **split)
    (kept,) = kept_if_it_fits(plan, question_of(options).profiles)
    assert kept == 8 * 2 * 32 * 1024 * 4096 * 2 * 7 // 8
    assert f", {(estimate.memory_bytes + kept) / GIB:.1f} expected, with gathered" in verdict_of(options, **split)
    ours = question_of(AdviseOptions(**asked | {"runtime": None})).profiles
    assert f", {estimate.memory_bytes / GIB:.1f} expected" in verdict(plan, estimate, ours)
