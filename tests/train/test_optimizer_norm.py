"""Gradients are clipped by their norm in 32 bits at least, whatever format they are in."""

import math

import pytest
import torch
from torch import nn

from shardwright_train.engine.learning_rate import ANY
from shardwright_train.engine.optimizer import ShardedOptimizer
from shardwright_train.parallel.world import World


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_gradients_in_16_bits_is_taken_in_32(one_rank: World, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(1042, dtype=dtype))
    optimizer = ShardedOptimizer({"weight": parameter}, ANY)
    parameter.grad = torch.ones_like(parameter)
    outcome = optimizer.step(1, torch.zeros((), dtype=torch.float64), False)
    assert outcome.grad_norm == pytest.approx(math.sqrt(1042), rel=1e-15 if dtype is torch.float64 else 1e-6)
