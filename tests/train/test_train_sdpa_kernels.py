"""Which kernel is behind PyTorch's attention: chosen, named, and deterministic where a run asks for that."""

import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from random_plans import random_plan
from test_train_kernels import CUDA, EAGER, FLASH, SDPA, planned
from tiny_models import tiny
from torch import Tensor

from shardwright.io import BadInput
from shardwright.types import Attention, ContextParallel, Plan, Precision
from shardwright_train.models import attention_kernels as kernels
from shardwright_train.models.attention_kernels import use_kernels
from shardwright_train.models.support import check_supported
from shardwright_train.parallel import attention_blocks
from shardwright_train.start import check_deterministic, deterministic, prepare_environment


@pytest.fixture
def cpu_kernels() -> Iterator[None]:
    yield
    use_kernels(Precision(), SDPA.value, torch.device("cpu"))


def test_plain_arithmetic_takes_the_place_of_no_fused_kernel_unasked(cpu_kernels: None) -> None:
    x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    wanted = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    use_kernels(Precision(), SDPA.value, CUDA)
    with pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    use_kernels(Precision(), Attention.SDPA_MATH.value, CUDA)
    F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x, is_causal=True), wanted)


def test_factors_are_rounded_to_tf32_where_the_plan_says_so_alone(cpu_kernels: None) -> None:
    for tf32 in (True, False):
        use_kernels(Precision(tf32=tf32), SDPA.value, CUDA)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is tf32, "convolutions too"


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("sdpa", {"flash", "mem_efficient", "cudnn"}),
        ("sdpa_flash", {"flash"}),
        ("sdpa_efficient", {"mem_efficient"}),
        ("sdpa_cudnn", {"cudnn"}),
        ("sdpa_math", {"math"}),
    ],
)
def test_a_plan_chooses_the_kernel_behind_sdpa(cpu_kernels: None, asked: str, taken: set[str]) -> None:
    use_kernels(Precision(), asked, CUDA)
    cuda = torch.backends.cuda
    enabled = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "cudnn", "math")}
    assert {name for name, is_enabled in enabled.items() if is_enabled} == taken
    # Across ranks the flash kernel computes unless the other is asked for.
    assert attention_blocks._only_efficient() == (asked == "sdpa_efficient")


@pytest.mark.parametrize("asked", ["sdpa_efficient", "sdpa_cudnn"])
def test_a_kernel_of_gpus_is_refused_on_the_processor(asked: str) -> None:
    with pytest.raises(
        BadInput, match=f"attention {asked} needs CUDA, but the plan is for cpu: use auto, sdpa or sdpa_fl"
    ):
        check_supported(planned(attention=Attention(asked), device="cpu"), "plan.json")
    check_supported(planned(attention=Attention(asked)), "plan.json")


def rings(attention: Attention) -> Plan:
    """A plan for two GPUs that share positions out in every block, round a ring."""
    plan = random_plan(tiny("llama", hidden_size=64), 0, 2, "bfloat16", stages=1)
    shared = {"tp_size": 1, "cp_size": 2, "dp_size": 1, "tp_consecutive": True, "context": ContextParallel.RING}
    layers = tuple(msgspec.structs.replace(layer, **shared) for layer in plan.layers)
    return msgspec.structs.replace(plan, cluster=planned(ranks=2).cluster, layers=layers, attention=attention)


def test_a_plan_of_rings_cannot_have_a_kernel_that_rings_have_not() -> None:
    with pytest.raises(BadInput, match=r"attention sdpa_cudnn attends to no positions of other ranks, .*: use sdpa_fl"):
        check_supported(rings(Attention.SDPA_CUDNN), "plan.json")
    check_supported(rings(Attention.SDPA_FLASH), "plan.json")


def test_the_kernel_behind_sdpa_is_named_and_so_is_another_across_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU takes cuDNN's for plain layers, while attention across ranks is by PyTorch's flash kernel."""
    plan = random_plan(tiny("llama"), 0, 1, "float32", stages=1)
    ran = [kernels.kernels_run(plan, Attention(name), torch.device("cpu")) for name in ("sdpa", "sdpa_math", "eager")]
    assert ran == ["flash", "math", ""]
    monkeypatch.setattr(kernels, "sdpa_choice", lambda *_tensors, **_settings: "cudnn")
    monkeypatch.setattr(kernels, "_trials", lambda *_of: [kernels._Trial((), {})])  # type: ignore[arg-type]
    gpu: Any = SimpleNamespace(rank=0, device=CUDA)
    assert kernels._by(planned(), SDPA, gpu, False) == " by cudnn"
    assert kernels._by(rings(SDPA), SDPA, gpu, False) == " by cudnn, across ranks by flash"
    assert kernels._by(rings(SDPA), SDPA, gpu, True) == " by cudnn, across ranks by efficient"
    assert kernels._by(planned(), EAGER, gpu, False) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"attention": Attention.SDPA_CUDNN},
            "attention sdpa_cudnn has no deterministic form (--deterministic): use s",
        ),
        ({"compile": True}, "compile: the compiler may choose other kernels in each start (--deterministic)"),
        ({"fused": ("norm",)}, "fused norm: flash-attn promises no deterministic form of it (--deterministic)"),
    ],
)
def test_what_has_no_deterministic_form_is_refused(change: dict[str, Any], words: str) -> None:
    check_deterministic(planned(attention=FLASH), "plan.json")
    with pytest.raises(BadInput, match=f"^plan\\.json: {re.escape(words)}"):
        check_deterministic(planned(**change), "plan.json")


def test_an_operation_without_a_deterministic_form_is_one_line() -> None:
    def step(x: Tensor) -> Tensor:
        return x.put_(torch.tensor([0, 0]), torch.ones(2))

    with deterministic("plan.json", asked=False):
        step(torch.zeros(2))
        assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(BadInput, match=r"^plan\.json: put_ has no deterministic form here \(--deterministic\): leave"):
        with deterministic("plan.json", asked=True):
            step(torch.zeros(2))
    with pytest.raises(RuntimeError, match="another"), deterministic("plan.json", asked=True):
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("another")
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rank_reads_what_cublas_asks_for_before_it_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment := {"PATH": "p"})
    prepare_environment()
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and environment["PATH"] == "p"
