"""Training steps of single ranks of a plan on a null device, the others of which do not exist."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from unittest.mock import patch

import torch
import torch.distributed as dist
from parity_worker import packed
from tiny_models import batch_of, engine_of
from torch import Tensor

from shardwright.types import Plan
from shardwright_train.data.share import on_host
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.models.attention_kernels import settle_attention
from shardwright_train.models.base import family_named
from shardwright_train.parallel import experts, process_groups
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.torch_private import FakeStore

STEPS = 2
SETTINGS = Hyperparameters(learning_rate=1e-3, warmup_steps=1, steps=STEPS, weight_decay=0.1, clip_norm=1.0)


def train(plan: Plan, rank: int) -> str:
    """Train one rank of a plan for two steps, and return the attention that it ran with."""
    with _world_of(plan, rank) as world:
        (attention,) = settle_attention([plan], world, by_document="packed" in plan.name)
        engine = engine_of(plan, world, Groups("cuda"), attention, SETTINGS)
        batch = batch_of(plan.model, plan.global_batch_size, seed=0)
        if "packed" in plan.name:
            batch = packed(batch, 0, family_named(plan.model.family, "test").learns(plan.model).predicts_next)
        for number in range(1, STEPS + 1):
            step = Step.of_batch(on_host(batch, world.device), engine.stage.context.share, number=number)
            engine.train_step(step)
        torch.cuda.synchronize()
    return attention


@contextmanager
def _world_of(plan: Plan, rank: int) -> Iterator[World]:
    """The world of a plan's rank: nothing is sent, and what is received is whatever was in memory."""
    size = plan.world_size
    with ExitStack() as undone:
        undone.enter_context(redirect_stderr(StringIO()))
        # The options of NCCL are not for the group that stands for it.
        undone.enter_context(patch.object(process_groups, "edge_options", lambda _device, _channels: None))
        # How many positions chose an expert is not known on a device that computes nothing: the same for each.
        undone.enter_context(patch.object(experts, "FakeTensor", Tensor))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        undone.callback(dist.destroy_process_group)
        sys.excepthook = sys.__excepthook__  # it would name a rank
        yield World(rank, size, torch.device("cuda", 0), "fake", heartbeat=None)  # type: ignore[arg-type]
