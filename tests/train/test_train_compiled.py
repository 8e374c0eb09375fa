"""Compiled blocks: one graph for each type of block and strategy, whatever the strategy, and what it keeps."""

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch
import torch.distributed as dist
from test_train_kernels import planned
from test_train_saved_bytes import HIDDEN, RANKS, SAMPLES, plan_of
from tiny_models import SEQUENCE_LENGTH, batch_of, engine_of, tiny
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from shardwright.io import BadInput
from shardwright.types import LayerStrategy, Plan, Recompute, SequenceParallel, Strategy
from shardwright_train.models.attention_kernels import check_kernels
from shardwright_train.models.base import family_named
from shardwright_train.parallel import checkpointing
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.torch_private import FakeStore, compiled

pytestmark = pytest.mark.timeout(900)

SPLIT, REPLAY = SequenceParallel, Recompute
MIXED = (
    (SPLIT.MEGATRON, REPLAY.NONE),
    (SPLIT.MEGATRON, REPLAY.SELECTIVE),
    (SPLIT.NONE, REPLAY.ATTENTION),
    (SPLIT.ULYSSES, REPLAY.MLP),
    (SPLIT.ULYSSES, REPLAY.FULL),
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """One rank of a world whose messages go nowhere, and a compiler that takes a second."""
    torch.compiler.reset()
    monkeypatch.setattr(checkpointing, "compiled", partial(compiled, backend="aot_eager"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield World(0, RANKS, torch.device("cpu"), "fake", heartbeat=None)  # type: ignore[arg-type]
    dist.destroy_process_group()


def step_of(plan: Plan, world: World) -> None:
    engine = engine_of(msgspec.structs.replace(plan, compile=True), world, Groups("cpu"))
    batch = batch_of(plan.model, plan.global_batch_size, 0)
    engine.forward_backward(Step.of_batch(batch, engine.stage.context.share))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_no_strategy_breaks_the_graph_of_a_block(world: World, family: str) -> None:
    plan = plan_of(family)
    mixed = zip(plan.model.layers, MIXED, strict=False)
    layers = (
        LayerStrategy(type=kind, tp_size=RANKS, dp_size=1, sequence_parallel=split, recompute=again)
        for kind, (split, again) in mixed
    )
    step_of(msgspec.structs.replace(plan, layers=tuple(layers)), world)
    assert dict(counters["graph_break"]) == {}


def test_dropout_breaks_no_graph(world: World) -> None:
    plan = plan_of("gpt2", sequence_parallel=SPLIT.MEGATRON, recompute=REPLAY.MLP)
    step_of(msgspec.structs.replace(plan, model=tiny("gpt2", vocab_size=64, resid_pdrop=0.1, attn_pdrop=0.1)), world)
    assert dict(counters["graph_break"]) == {}


def test_a_compiled_megatron_layer_keeps_its_own_positions_of_what_it_gathers(world: World) -> None:
    whole = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == SAMPLES * SEQUENCE_LENGTH * HIDDEN and not isinstance(x, torch.nn.Parameter):
            whole.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        step_of(plan_of("llama", sequence_parallel=SPLIT.MEGATRON), world)
    assert len({x.untyped_storage().data_ptr() for x in whole}) <= 2, "embedding and head are not compiled"


def test_dropout_that_ranks_would_share_is_refused() -> None:
    plan = planned("gpt2", ranks=2)
    split = {"tp_size": 2, "dp_size": 1}
    layers = tuple(LayerStrategy(type="block", **split) for _ in plan.layers)
    model = tiny("gpt2", attn_pdrop=0.1)
    outer = Strategy(**split)
    plan = msgspec.structs.replace(plan, model=model, layers=layers, embedding=outer, head=outer, compile=True)
    with pytest.raises(BadInput, match=r"compile: layers\[0\] splits heads over ranks, which would all drop the same"):
        check_kernels(plan, family_named("gpt2", "test"), torch.device("cpu"), "plan.json")
