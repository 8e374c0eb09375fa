"""Gradients of a replicated layer go in few messages, and come out summed, each in its place."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.plan import communication
from shardwright.plan.communication import copied_bucket_bytes, gradient_buckets
from shardwright_train.parallel.data import GradientAllReduce

Sent = list[Tensor]


class Done:
    """A message that has come."""

    def wait(self) -> None:
        """It has."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What was summed, over two replicas with the same gradients."""
    found: Sent = []

    def all_reduce(x: Tensor, group: object, async_op: bool) -> Done:
        assert async_op, "the backward pass goes on beside it"
        found.append(x)
        x.mul_(2)
        return Done()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


@pytest.fixture
def layer() -> nn.Module:
    """A matrix of 96 bytes, and small parameters around it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4))


def backward(layer: nn.Module, reduce: bool = True) -> GradientAllReduce:
    reduction = GradientAllReduce(tuple(layer.modules()), None)  # type: ignore[arg-type]
    for _ in range(2):
        reduction.collect()
        reduction.armed = reduce
        layer(torch.arange(12.0).view(2, 6)).square().sum().backward()
        reduction.start()
    return reduction


def gradients(layer: nn.Module) -> list[Tensor]:
    return [p.grad for p in layer.parameters() if p.grad is not None]


def test_a_layer_takes_one_message_and_each_gradient_is_summed(sent: Sent, layer: nn.Module) -> None:
    backward(layer, reduce=False)
    wanted = [2 * x for x in gradients(layer)]
    layer.zero_grad()
    backward(layer).finish()
    assert [x.numel() for x in sent] == [2 * (sum(x.numel() for x in wanted) // 2)] * 2, "one for each microbatch"
    assert all(torch.equal(mine, other) for mine, other in zip(gradients(layer), wanted, strict=True))


def test_a_gradient_as_large_as_a_bucket_is_summed_where_it_lies(
    sent: Sent, layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "GRADIENT_BUCKET_BYTES", 96)
    layer(torch.arange(12.0).view(2, 6)).square().sum().backward()
    matrix = gradients(layer)[2]
    reduction = GradientAllReduce(tuple(layer.modules()), None)  # type: ignore[arg-type]
    reduction.armed = True
    reduction.start()
    assert [x.numel() for x in sent] == [12, 24, 12]
    assert sent[1] is matrix


@pytest.mark.parametrize(
    ("sizes", "together", "copied"),
    [
        ([], [], 0),
        ([10, 20, 30], [[0, 1, 2]], 60),
        ([60, 50, 10, 40], [[0], [1, 2, 3]], 100),
        ([300, 1, 1, 300, 1], [[0], [1, 2], [3], [4]], 2),
        ([100, 100], [[0], [1]], 0),
    ],
)
def test_buckets_are_filled_in_order(
    sizes: list[int], together: list[list[int]], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "GRADIENT_BUCKET_BYTES", 100)
    assert [list(bucket) for bucket in gradient_buckets(sizes)] == together
    assert copied_bucket_bytes(sizes) == copied


def test_a_gradient_that_comes_too_late_is_seen(sent: Sent, layer: nn.Module) -> None:
    reduction = backward(layer)
    layer(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="too late"):
        reduction.collect()
