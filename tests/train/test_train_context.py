"""What cannot be run where positions attend across ranks is refused in one line, and masks are of a rank's rows."""

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from context_plans import with_context
from random_plans import on_devices, random_plan
from tiny_models import batch_of, engine_of, tiny

from shardwright.io import BadInput
from shardwright.models.traits import Mask
from shardwright.plan.layout import zigzag
from shardwright.types import Attention, ContextParallel, LayerStrategy, Plan
from shardwright_train.data.share import Batch
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places, alibi_mask, document_mask, window_mask
from shardwright_train.models.support import check_supported
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step, on_device
from shardwright_train.torch_private import FakeStore

LENGTH = 16
LEAST = torch.finfo(torch.float64).min


def planned(family: str = "llama", **changes: Any) -> Plan:
    """A plan on two ranks that share the positions of each block out."""
    plan = random_plan(tiny(family, **changes), 0, 2, "bfloat16", stages=1)
    layers = tuple(LayerStrategy(type=kind, tp_size=1, cp_size=2, dp_size=1) for kind in plan.model.layers)
    return msgspec.structs.replace(plan, layers=layers)


def on_gpus() -> Plan:
    return msgspec.structs.replace(on_devices(planned(), *["NVIDIA H200"] * 2), attention=Attention.FLASH_ATTENTION_2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned("gpt2", attn_pdrop=0.1), "cp_size above 1 drops nothing inside attention, for which attn_pdrop has"),
        (planned("t5", dropout_rate=0.1), "for which dropout_rate has a rate: describe the model with dropout_rate 0"),
        (msgspec.structs.replace(planned(), compile=True), "compile: blocks that attend to positions of other ranks"),
        (on_gpus(), "attention flash_attention_2 attends to no positions of other ranks, as cp_size asks for"),
    ],
    ids=["attention dropout", "one dropout", "compile", "flash"],
)
def test_what_cannot_attend_across_ranks_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(BadInput, match=r"^plan\.json: ") as refused:
        check_supported(plan, "plan.json")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_dropout_outside_attention_stays() -> None:
    check_supported(planned("gpt2", embd_pdrop=0.1, resid_pdrop=0.1), "plan.json")
    check_supported(with_context(random_plan(tiny("llama"), 3, 4), 3), "plan.json")


def test_a_ring_attends_beside_the_kernel_that_auto_falls_back_to() -> None:
    """On GPUs none of sdpa takes grouped heads in float32, and `auto` is eager; the ring's blocks are taken."""
    plan = planned()
    rings = tuple(msgspec.structs.replace(layer, context=ContextParallel.RING) for layer in plan.layers)
    plan = msgspec.structs.replace(plan, layers=rings)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = World(0, 2, torch.device("cpu"), "fake", heartbeat=None)  # type: ignore[arg-type]
        engine = engine_of(plan, world, Groups("cpu"), Attention.EAGER.value)
        batch = batch_of(plan.model, plan.global_batch_size, 0)
        engine.forward_backward(Step.of_batch(batch, engine.stage.context.share))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", ["window", "slopes", "documents", "padded documents"])
def test_masks_of_a_rank_are_the_rows_of_the_whole_one_in_the_order_of_the_plan(kind: str, rank: int) -> None:
    example, order = torch.zeros(1, dtype=torch.float64), torch.tensor(zigzag(LENGTH, 4))
    documents = (torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.3).long().cumsum(1)
    padding = (torch.arange(LENGTH) < 13).expand(2, -1) if kind == "padded documents" else None

    def made(places: Places, numbers: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        if kind == "window":
            return window_mask(places, 5, example, Mask.CAUSAL)
        if kind == "slopes":
            return alibi_mask(places, [0.5, 0.25], example)
        return document_mask(numbers, torch.float64, real, places)

    rows = slice(rank * LENGTH // 4, (rank + 1) * LENGTH // 4)
    mine = made(Places(LENGTH, rows, rows, order), documents[:, order], None if padding is None else padding[:, order])
    whole = made(Places.whole(LENGTH), documents, padding)
    assert torch.equal(mine, whole[..., order[rows], :][..., order])
    assert (mine == LEAST).any() and (mine > LEAST).any(-1).all()


@pytest.mark.parametrize("family", ["llama", "whisper", "llava", "gemma3", "vit"])
def test_pixels_and_spectrograms_keep_their_order(family: str) -> None:
    """As positions would lie in any family: those of a spectrogram, or beside an image, keep theirs so far."""
    runtime, model = family_named(family, "test"), tiny(family)
    order = torch.arange(model.sequence_length).flip(0)
    context = Mock(spec=RankContext, family=runtime, order=order, device=torch.device("cpu"), depths=0)
    batch: Batch = runtime.learns(model).random_batch(3, torch.Generator().manual_seed(0))
    there = on_device(batch, context)
    along = {name for name, x in batch.items() if x.shape == (3, model.sequence_length)}
    assert along or family == "vit"
    assert {name for name, x in batch.items() if not torch.equal(there[name], x)} == along
