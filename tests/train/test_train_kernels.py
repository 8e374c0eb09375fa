"""Which attention kernel runs, and what is said where one cannot: no kernel of flash-attn runs here, without a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from command_calls import call
from forked_command import forked_command
from random_plans import random_plan
from tiny_models import SEQUENCE_LENGTH, batch_of, tiny
from torch import Tensor
from transformers.integrations import flash_attention

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.mtp import with_mtp
from shardwright.types import Attention, Measurement, Plan, Plans, Precision, SequenceParallel, Strategy
from shardwright_train.cli import APP
from shardwright_train.models import attention_kernels as kernels
from shardwright_train.models import support
from shardwright_train.models.attention_kernels import check_kernels, settle_attention
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places
from shardwright_train.models.support import check_installed, check_supported, without_devices
from shardwright_train.parallel import tensor
from shardwright_train.parallel.tensor import SHARED_ATTENTION, share_attention
from shardwright_train.parallel.world import World

SDPA, FLASH, EAGER = Attention.SDPA, Attention.FLASH_ATTENTION_2, Attention.EAGER
BFLOAT16 = Precision(parameters="float32", compute="bfloat16", reduce="float32")
EVERYTHING = ("rotary", "norm", "cross_entropy")
CUDA = torch.device("cuda", 0)


def planned(family: str = "llama", device: str = "NVIDIA H100 80GB HBM3", ranks: int = 1, **changes: Any) -> Plan:
    """A plan for a device that may not be here."""
    plan = random_plan(tiny(family, vocab_size=64), 0, ranks, "float32", stages=1)
    types = {name: msgspec.structs.replace(node, device=device) for name, node in plan.cluster.node_types.items()}
    cluster = msgspec.structs.replace(plan.cluster, node_types=types)
    return msgspec.structs.replace(plan, cluster=cluster, **({"precision": BFLOAT16} | changes))


def wide_heads() -> Plan:
    model = tiny("llama", hidden_size=1056, num_attention_heads=2, num_key_value_heads=2)
    return msgspec.structs.replace(planned(attention=FLASH), model=model)


def odd_vocabulary() -> Plan:
    plan = random_plan(tiny("llama"), 0, 2, "bfloat16", stages=1)
    head = Strategy(tp_size=2, dp_size=1)
    return msgspec.structs.replace(plan, cluster=planned(ranks=2).cluster, head=head, fused=("cross_entropy",))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: planned(attention=FLASH, device="cpu"),
            "attention flash_attention_2 needs CUDA, but the plan is for cpu",
        ),
        (lambda: planned(attention=FLASH, precision=Precision()), "in bfloat16 or float16, but the plan in float32"),
        (wide_heads, "heads of up to 256 features, but the model has 528"),
        (
            lambda: planned("deepseek_v2", attention=FLASH),
            "does not support value heads of another width than query heads",
        ),
        (lambda: planned(fused=EVERYTHING, device="cpu"), "fused rotary, norm, cross_entropy needs CUDA"),
        (
            lambda: planned(
                fused=("norm",), precision=Precision(parameters="float64", compute="float64", reduce="float64")
            ),
            "in at most float32, but the plan in float64",
        ),
        (
            lambda: planned("t5", attention=FLASH),
            "not supported for t5 models: use one of: auto, sdpa, sdpa_math, sdpa_efficient, eager",
        ),
        (
            lambda: planned("ministral3", attention=FLASH),
            "not supported for ministral3 models: use one of: auto, sdpa,",
        ),
        (lambda: planned("gemma2", attention=SDPA), "for gemma2 models: use one of: auto, flash_attention_2, eager"),
        (odd_vocabulary, "the head's tp_size 2 does not divide 61 classes"),
        (lambda: planned(precision=Precision(compute="float16", reduce="float16")), "float32/float16/float16"),
        (lambda: planned(precision=Precision(tf32=True), device="cpu"), "tf32 needs CUDA, but the plan is for cpu"),
        (lambda: planned(precision=Precision(parameters="float16", compute="float16")), "float16/float16/float32"),
    ],
)
def test_a_plan_that_no_device_can_run_is_refused(make: Callable[[], Plan], words: str) -> None:
    with pytest.raises(BadInput, match=r"^plan\.json: ") as refused:
        check_supported(make(), "plan.json")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "plan",
    [
        planned(attention=FLASH),
        planned(attention=EAGER, device="cpu"),
        planned(fused=EVERYTHING),
        planned(precision=Precision(parameters="float32", compute="float16", reduce="float32"), device="cpu"),
        msgspec.structs.replace(odd_vocabulary(), head=Strategy(tp_size=1, dp_size=2)),
        msgspec.structs.replace(
            odd_vocabulary(), head=Strategy(tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.ULYSSES)
        ),
    ],
)
def test_a_plan_that_some_device_can_run_is_not_refused(plan: Plan) -> None:
    check_supported(plan, "plan.json")


def test_a_dry_run_refuses_a_kernel_that_the_family_cannot_use(tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", planned("gemma2", attention=Attention.SDPA_MATH, device="cpu"))
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert "plan.json: attention sdpa_math is not supported for gemma2 models: use one of: auto," in ended.stderr


def test_blocks_with_experts_are_not_compiled(tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", planned("qwen3_moe", compile=True, device="cpu"))
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert "plan.json: compile: blocks with experts cannot be compiled" in ended.stderr


@pytest.mark.parametrize(
    "command", [("check",), ("measure", "--out"), ("run", "--data", "d", "--checkpoints", "c", "--steps", "1", "--out")]
)
def test_a_plan_in_fp8_is_estimated_and_not_run(command: tuple[str, ...], tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", planned(precision=Precision(compute="fp8"), device="cpu"))
    out = (str(tmp_path / "out"),) if command[-1] == "--out" else ()
    ended = call(APP, command[0], str(tmp_path / "plan.json"), *command[1:], *out)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert (
        ended.stderr == f"error: {tmp_path / 'plan.json'}: precision fp8 is only for estimates: compute in bfloat16\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_layers_that_predict_further_tokens_are_not_compiled(tmp_path: Path) -> None:
    plan = planned(device="cpu")
    model = with_mtp(plan.model, 1)
    further = msgspec.structs.replace(plan.layers[-1], type=model.layers[-1])
    stage = msgspec.structs.replace(plan.stages[0], layers=((0, len(model.layers)),))
    assert len(model.layers) == len(plan.layers) + 1 and len(plan.stages) == 1
    layers = (*plan.layers, further)
    plan = msgspec.structs.replace(plan, model=model, layers=layers, stages=(stage,), compile=True)
    write_document(tmp_path / "plan.json", plan)
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    said = "compile: layers that predict further tokens (mtp) are not compiled: leave it out"
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"error: {tmp_path / 'plan.json'}: {said}")


@pytest.mark.parametrize("command", ["run", "measure"])
@pytest.mark.parametrize(
    ("change", "words"),
    [({"attention": FLASH}, "attention flash_attention_2"), ({"fused": EVERYTHING}, "fused rotary and fused norm")],
)
def test_a_missing_flash_attn_is_one_line_that_says_how_to_install_it(
    tmp_path: Path, command: str, change: dict[str, Any], words: str
) -> None:
    write_document(tmp_path / "plan.json", planned(**change))
    options = {
        "run": ["--data", "d", "--steps", "1", "--out", "o", "--checkpoints", str(tmp_path / "c")],
        "measure": ["--out", str(tmp_path / "measurement.json")],
    }
    ended = call(APP, command, str(tmp_path / "plan.json"), *options[command])
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert f"plan.json: flash-attn is not installed, and {words}" in ended.stderr
    assert "pip install 'shardwright[flash-attn]'" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_flash_attn_is_found_by_the_name_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, found in (("flash-attn-4", False), ("flash-attn", True)):
        (folder := tmp_path / f"{name.replace('-', '_')}-2.8.3.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.8.3\n")
        assert support.flash_attn_is_installed() == found
    check_installed(planned(attention=FLASH, fused=EVERYTHING), "plan.json")


@pytest.mark.parametrize(
    ("plan", "device", "words"),
    [
        (planned(attention=FLASH), CUDA, "needs compute capability 8.0, Tesla V100 has 7.0"),
        (planned(attention=FLASH), torch.device("cpu"), "needs CUDA, this is cpu"),
        (planned("gpt2", attention=SDPA), CUDA, "no fused kernel here (none): use sdpa_math or eager"),
        (planned("gpt2", fused=("norm", "rotary")), CUDA, "fused rotary: gpt2 models have no module"),
        (planned("gemma2", fused=("norm",)), CUDA, "fused norm: gemma2 models have no module"),
    ],
)
def test_a_rank_refuses_what_it_or_the_family_cannot_do(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, device: torch.device, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla V100")
    monkeypatch.setattr(kernels, "_refusal", lambda *_of: "has no fused kernel here (none)")
    with pytest.raises(BadInput, match=r"^plan\.json: ") as refused:
        check_kernels(plan, family_named(plan.model.family, "test"), device, "plan.json")
    assert words in str(refused.value)


def test_a_rank_takes_what_it_and_the_family_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(kernels, "_refusal", lambda *_of: None)
    for plan in (planned(attention=FLASH, fused=EVERYTHING), planned("bert", fused=("norm",)), planned("t5")):
        check_kernels(plan, family_named(plan.model.family, "test"), CUDA, "plan.json")


def test_auto_takes_sdpa_where_there_is_nothing_faster_and_says_so(
    one_rank: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settle_attention([planned(), planned(attention=EAGER)], one_rank) == ("sdpa", "eager")
    assert capsys.readouterr().err == "attention: sdpa (auto), eager\n"
    # sdpa would ignore the bounds of the scores.
    assert settle_attention([planned("gemma2")], one_rank) == ("eager",)


@pytest.mark.parametrize(
    ("plans", "settled"),
    [
        ([planned(), planned(attention=EAGER)], ("flash_attention_2", "eager")),
        ([planned(), planned(precision=Precision())], ("sdpa", "sdpa")),
        ([planned(), planned("t5")], ("sdpa", "sdpa")),
        ([planned(), planned("t5", attention=SDPA)], ("flash_attention_2", "sdpa")),
    ],
)
def test_auto_takes_flash_attn_where_every_such_plan_can(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, plans: list[Plan], settled: tuple[str, ...]
) -> None:
    monkeypatch.setattr(kernels, "_lack", lambda _device: None)
    assert set(settle_attention(plans, one_rank)) <= {"sdpa", "eager"}  # it is not installed
    monkeypatch.setattr(kernels, "flash_attn_is_installed", lambda: True)
    assert settle_attention(plans, one_rank) == settled


def test_auto_takes_sdpa_where_documents_are_told_apart_which_flash_attn_cannot(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_lack", lambda _device: None)
    monkeypatch.setattr(kernels, "flash_attn_is_installed", lambda: True)
    assert settle_attention([planned()], one_rank, by_document=True) == ("sdpa",)
    family = family_named("llama", "test")
    check_kernels(planned(), family, CUDA, "plan.json", by_document=True)
    with pytest.raises(BadInput, match=r"plan\.json: attention flash_attention_2 does not separate documents, as"):
        check_kernels(planned(attention=FLASH), family, CUDA, "plan.json", by_document=True)


def test_auto_takes_what_every_rank_can(one_rank: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_lack", lambda _device: None)
    monkeypatch.setattr(kernels, "flash_attn_is_installed", lambda: True)
    other = kernels._FASTEST_LAST.index(SDPA)

    def with_an_older_device(best: Tensor, operation: Any) -> None:
        assert operation == dist.ReduceOp.MIN
        best.clamp_(max=other)

    monkeypatch.setattr(dist, "all_reduce", with_an_older_device)
    assert settle_attention([planned()], one_rank) == ("sdpa",)


def test_auto_leaves_sdpa_where_a_gpu_has_no_fused_kernel(one_rank: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_fused_lack", lambda *_of: "has none")
    assert settle_attention([planned()], one_rank) == ("eager",)


@pytest.mark.parametrize(
    ("family", "change", "refused"),
    [
        ("llama", {}, False),
        ("bert", {}, False),
        ("gpt2", {"attn_pdrop": 0.1}, True),
        ("t5", {"dropout_rate": 0.1}, True),
    ],
)
def test_fused_attention_is_tried_before_a_plan_runs(family: str, change: dict[str, Any], refused: bool) -> None:
    plan = random_plan(tiny(family, **change), 0, 1, "float32", stages=1)
    # On CPU there is a fused kernel of attention without dropout.
    found = kernels._refusal(plan, family_named(family, "test"), torch.device("cpu"))
    assert (found is not None) == refused, found


@pytest.mark.parametrize(("family", "group"), [("llama", 2), ("gpt2", 1), ("bert", 1)])
def test_heads_that_share_their_keys_are_tried_as_transformers_hands_them_over(
    family: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(query: Tensor, key: Tensor, _value: Tensor, *, enable_gqa: bool, **_rest: object) -> Tensor:
        assert (query.shape[1], key.shape[1], enable_gqa) == (group, 1, group > 1)
        raise RuntimeError("seen")

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", refuse)
    plan = random_plan(tiny(family), 0, 1, "float32", stages=1)
    found = kernels._refusal(plan, family_named(family, "test"), torch.device("cpu"))
    assert found == "has no fused kernel here (seen)"


def test_a_measurement_names_what_auto_took(tmp_path: Path) -> None:
    cpu = {"device": "cpu", "precision": Precision(), "num_microbatches": 1, "global_batch_size": 1}
    plans = (planned(attention=EAGER, **cpu), planned(**cpu))
    write_document(tmp_path / "plans.json", Plans(plans=plans))
    asked = ["--steps", 1, "--warmup-steps", 1, "--out", tmp_path / "measurement.json"]
    done = forked_command(["measure", tmp_path / "plans.json", *asked])
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0 and "attention: eager, sdpa (auto)\n" in err, err
    measured = read_document(tmp_path / "measurement.json", Measurement)
    assert (measured.attention, measured.attention_by) == ("sdpa", "flash")


def test_what_is_checked_without_a_device_is_the_plan_without_flash_attn() -> None:
    for kernel in (EAGER, Attention.SDPA_MATH):
        assert without_devices(planned(attention=kernel), "sdpa") == (planned(attention=kernel), kernel.value)
    assert without_devices(planned(attention=FLASH, fused=EVERYTHING), "sdpa") == (planned(attention=FLASH), "sdpa")


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 6)])
def test_ulysses_wraps_flash_attention_as_what_it_is_and_it_is_told_the_window(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, name: str, window: int | None
) -> None:
    asked = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> Tensor:
        asked.append((options["attn_implementation"], options["sliding_window"], options["is_causal"]))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        behind = torch.arange(SEQUENCE_LENGTH)[:, None] - torch.arange(SEQUENCE_LENGTH)
        seen = (behind >= 0) & (behind < (options["sliding_window"] or SEQUENCE_LENGTH))
        attended = F.scaled_dot_product_attention(q, k, v, seen, scale=options["softmax_scale"], enable_gqa=True)
        return attended.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", stand_in)
    model, family = tiny(name), family_named(name, "test")
    batch = batch_of(model, 2, 0)
    states = torch.randn(2, SEQUENCE_LENGTH, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for kernel, computed in ((SDPA.value, SDPA), (SHARED_ATTENTION, FLASH)):
        constants = family.constants(model, model.layers[0], Places.whole(SEQUENCE_LENGTH), states, computed.value)
        torch.manual_seed(0)
        block = family.build(model, "layers[0]", kernel)
        family.initialize(model, block)
        if kernel == SHARED_ATTENTION:
            facts = dict(splits_everything=True, attends_across=False, order=None, stand_in=None, recomputation=None)
            shared: Any = SimpleNamespace(sequence_group=dist.group.WORLD, context_group=dist.group.WORLD, **facts)
            share_attention(block, shared, FLASH.value, torch.float32, keeps=False)
            monkeypatch.setattr(tensor, "copy", None)  # nothing is copied in a call
        outputs += family.call(block, (states,), batch, constants)
        assert block.self_attn.config._attn_implementation == kernel
    assert asked == [("flash_attention_2", window, True)]
    torch.testing.assert_close(*outputs)
