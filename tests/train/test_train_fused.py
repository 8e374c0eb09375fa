"""Flash-attn's rotary embedding, norm and cross entropy in place of the stock ones.

Its kernels need a GPU and are not run here: stand-ins in PyTorch take their place (flash_attn_stand_in.py), and what is
tested is what surrounds them.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import tiny
from torch import Tensor, nn
from transformers import CohereConfig, DeepseekV3Config
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama as llama

from shardwright.io import write_document
from shardwright.types import RECOMPUTE_WHOLE, DataParallel, LayerStrategy, Plan, Plans, SequenceParallel, Strategy
from shardwright_train.models.base import family_named
from shardwright_train.parallel.fused import fuse, fusible

EVERYTHING = ("rotary", "norm", "cross_entropy")


class AddedNorm(llama.LlamaRMSNorm):
    """Not what the kernel computes."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 2


class DroppingNorm(llama.LlamaRMSNorm):
    """Not what the kernel computes, though it is so in the mean."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden_states), 0.5, self.training)


def from_latents(pairs: bool) -> nn.Module:
    """DeepSeek-V3's attention, which turns pairs of features or halves."""
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    return DeepseekV3Attention(DeepseekV3Config(**shape, rope_interleave=pairs), 0)


@pytest.mark.parametrize(
    ("name", "module", "can"),
    [
        ("norm", lambda: llama.LlamaRMSNorm(32), True),
        ("norm", lambda: AddedNorm(32), False),
        ("norm", lambda: DroppingNorm(32), False),
        ("norm", lambda: Gemma2RMSNorm(32), False),
        ("norm", lambda: nn.LayerNorm(32), True),
        ("norm", lambda: nn.LayerNorm(32, elementwise_affine=False), False),
        ("norm", lambda: nn.Linear(32, 32, bias=False), False),
        ("rotary", lambda: llama.LlamaAttention(tiny_config(), 0), True),
        # It turns even features against odd ones, by a function of the same name.
        ("rotary", lambda: CohereAttention(CohereConfig(hidden_size=32, num_attention_heads=4), 0), False),
        *(("rotary", lambda pairs=pairs: from_latents(pairs), not pairs) for pairs in (True, False)),
        ("rotary", lambda: nn.Linear(32, 32), False),
        ("cross_entropy", lambda: nn.Linear(32, 32), True),
    ],
)
def test_what_is_fused_is_what_the_kernel_computes(name: str, module: Callable[[], nn.Module], can: bool) -> None:
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        made = module()
    assert fusible(made, name) == can
    assert torch.equal(torch.random.get_rng_state(), before)


def tiny_config() -> Any:
    config = family_named("llama", "test").configuration(tiny("llama"))
    config._attn_implementation = "sdpa"
    return config


def test_one_block_is_fused_and_the_stock_class_stays_as_it_is() -> None:
    first, second = (llama.LlamaAttention(tiny_config(), 0) for _ in range(2))
    stock = llama.apply_rotary_pos_emb
    fuse(first, EVERYTHING)
    assert first.forward.__func__.__globals__["apply_rotary_pos_emb"] is not stock
    assert second.forward.__func__ is llama.LlamaAttention.forward
    assert second.forward.__func__.__globals__["apply_rotary_pos_emb"] is llama.apply_rotary_pos_emb is stock


def on_two_ranks(name: str, dtype: str, family: str = "llama", vocab_size: int = 64, **sharding: Any) -> Plan:
    plan = random_plan(
        tiny(family, vocab_size=vocab_size, num_hidden_layers=len(RECOMPUTE_WHOLE)), 0, 2, dtype, stages=1
    )
    layers = tuple(LayerStrategy(type="block", recompute=recompute, **sharding) for recompute in RECOMPUTE_WHOLE)
    fused = EVERYTHING if family == "llama" else EVERYTHING[1:]
    return msgspec.structs.replace(
        plan, name=name, layers=layers, embedding=Strategy(**sharding), head=Strategy(**sharding), fused=fused
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    split, shared = {"tp_size": 2, "dp_size": 1}, {"tp_size": 1, "dp_size": 2}
    plans = (
        on_two_ranks("split", "float64", **split),
        on_two_ranks("sequence split", "float64", **split, sequence_parallel=SequenceParallel.MEGATRON),
        on_two_ranks("ulysses", "float64", vocab_size=61, **split, sequence_parallel=SequenceParallel.ULYSSES),
        on_two_ranks("shared", "float64", vocab_size=61, **shared, data_parallel=DataParallel.ZERO3),
        on_two_ranks("bert", "float64", "bert", **split, sequence_parallel=SequenceParallel.MEGATRON),
        on_two_ranks("bfloat16", "bfloat16", **split),
    )
    folder = tmp_path_factory.mktemp("fused")
    write_document(folder / "plans.json", Plans(plans=plans))
    run_worker("fused_worker", [str(folder / "plans.json"), str(folder / "errors.json")], 2)
    found: dict[str, dict[str, Any]] = json.loads((folder / "errors.json").read_bytes())
    return found


@pytest.mark.parametrize("name", ["split", "sequence split", "ulysses", "shared", "bert"])
def test_fused_kernels_give_the_same_loss_and_gradients(compared: dict[str, dict[str, Any]], name: str) -> None:
    found = compared[name]
    assert found["error"] < 1e-7 < 1e-3 < found["largest"]
    assert found["called"] == ["cross_entropy", *(["layer_norm"] if name == "bert" else ["rms_norm", "rotary"])]


def test_fused_kernels_are_near_in_bfloat16(compared: dict[str, dict[str, Any]]) -> None:
    assert 0 < compared["bfloat16"]["error"] < 0.02
