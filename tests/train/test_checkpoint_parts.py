"""What is saved is shared out among the ranks that hold it, without a word among them, and copied once."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from saved_steps import progress_of, saver_of, tensors_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright_train.checkpoints.folders import complete_checkpoints
from shardwright_train.checkpoints.tensors import HostBuffer, TensorShard, parts_to_save, read_tensors
from shardwright_train.parallel.world import World
from shardwright_train.torch_private import FakeStore

RANKS = 8
Tensors = Callable[[], dict[str, Tensor]]


def saved_by_each_rank(tensors: Tensors) -> list[tuple[TensorShard, ...]]:
    """What each rank saves of tensors that it makes, one rank after the other in worlds that are not there."""
    found = []
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            found.append(parts_to_save(tensors()))
        finally:
            dist.destroy_process_group()
    return found


def placed(*shape: int, mesh: tuple[int, ...], shards: tuple[int | None, ...]) -> Tensor:
    """A tensor over a mesh of all ranks, of which each axis shards a dim or replicates."""
    axes = init_device_mesh("cpu", mesh)
    placements = [Replicate() if dim is None else Shard(dim) for dim in shards]
    local = list(shape)
    for size, dim in zip(mesh, shards, strict=True):
        if dim is not None:
            local[dim] //= size
    return DTensor.from_local(torch.zeros(local), axes, placements, run_check=False)


def replicated() -> dict[str, Tensor]:
    """Two layers of one matrix and a norm, on eight replicas."""
    shapes = {"matrix": (64, 32), "norm": (32,)}
    return {
        f"{kind}.{layer}.{name}": placed(*shape, mesh=(RANKS,), shards=(None,))
        for kind in ("weight", "exp_avg", "exp_avg_sq", "other")
        for layer in range(2)
        for name, shape in shapes.items()
    }


def mixed() -> dict[str, Tensor]:
    """Layers of unlike meshes: replicas of shards of shards, replicas over two axes, none at all."""
    return {
        "hybrid": placed(32, 16, mesh=(2, 2, 2), shards=(None, 0, 1)),
        "tensor parallel": placed(32, 16, mesh=(4, 2), shards=(None, 0)),
        "norm": placed(16, mesh=(4, 2), shards=(None, None)),
        "sharded": placed(32, 16, mesh=(8,), shards=(0,)),
    }


@pytest.mark.parametrize("tensors", [replicated, mixed])
def test_each_element_is_saved_by_one_rank(tensors: Tensors) -> None:
    found = saved_by_each_rank(tensors)
    places = Counter((part.name, part.offsets) for parts in found for part in parts)
    assert set(places.values()) == {1}
    elements = Counter[str]()
    for part in (part for parts in found for part in parts):
        elements[part.name] += part.local.numel()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    assert elements == {name: x.numel() for name, x in tensors().items()}
    dist.destroy_process_group()


def test_replicas_copy_a_share_each_and_not_all() -> None:
    """Eight matrices of 8 KiB, and as many norms, on eight replicas: one of each on every rank."""
    sizes = [HostBuffer(parts).memory.nbytes for parts in saved_by_each_rank(replicated)]
    assert sizes == [64 * 32 * 4 + 32 * 4] * RANKS


def test_the_memory_that_is_copied_to_is_taken_once_and_given_back(tmp_path: Path, one_rank: World) -> None:
    saver, places = saver_of(tmp_path, asynchronous=True), []
    for step in (1, 2, 3):
        saver.save(tensors_of(step), progress_of(step))  # type: ignore[arg-type]
        (buffer,) = saver._buffer
        places.append(buffer.memory.data_ptr())
    saver.finish()
    assert all(one == other for one, other in pairwise(places))
    saver.close()
    assert not saver._buffer and buffer.memory.nbytes == 0
    for step, checkpoint in zip((3, 2, 1), complete_checkpoints(tmp_path), strict=True):
        found = {name: torch.zeros_like(x) for name, x in tensors_of(step).items()}
        read_tensors(checkpoint, found)
        assert all(torch.equal(found[name], x) for name, x in tensors_of(step).items())


@pytest.mark.parametrize("stage_bytes", [16, 24, 4096])
def test_copies_pass_through_two_stages_whatever_the_size_of_the_state(stage_bytes: int) -> None:
    """Stages smaller than a tensor, no divisor of its bytes, and larger; of tensors of every form."""
    forms = {
        "matrix": torch.randn(7, 33),
        "turned": torch.randn(9, 5).T,
        "half": torch.randn(13, dtype=torch.bfloat16),
        "number": torch.tensor(3.0, dtype=torch.float64),
    }
    buffer, memory = HostBuffer([TensorShard(name, (0,), x) for name, x in forms.items()], stage_bytes), set[int]()
    for _ in range(3):
        parts = [TensorShard(name, (0,), x.mul_(-2)) for name, x in forms.items()]
        copies = buffer.copied(parts)
        memory |= {stage.data_ptr() for stage in buffer.stages}
        assert all(torch.equal(copy.local, part.local) for copy, part in zip(copies, parts, strict=True))
        low, high = buffer.memory.data_ptr(), buffer.memory.data_ptr() + buffer.memory.nbytes
        assert all(low <= copy.local.data_ptr() < high for copy in copies)
    assert len(memory) == 2 and {stage.nbytes for stage in buffer.stages} == {stage_bytes}
    buffer.close()
    assert not buffer.stages


def test_a_stage_is_not_filled_again_before_it_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose copies arrive only once they are waited for."""
    waiting = list[tuple[Tensor, Tensor]]()
    copy = Tensor.copy_

    class Late:
        def record(self) -> None:
            self.copies = waiting.copy()
            waiting.clear()

        def synchronize(self) -> None:
            for there, here in self.copies:
                copy(there, here)

    def later(there: Tensor, here: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(there, here)
        waiting.append((there, here))
        return there

    monkeypatch.setattr(torch.cpu, "Event", Late, raising=False)
    monkeypatch.setattr(Tensor, "copy_", later)
    parts = [TensorShard("x", (0,), torch.arange(1000.0)), TensorShard("y", (0,), torch.arange(7.0))]
    copies = HostBuffer(parts, stage_bytes=100).copied(parts)
    assert all(torch.equal(one.local, part.local) for one, part in zip(copies, parts, strict=True))


def test_nothing_that_is_pickled_goes_between_ranks(
    tmp_path: Path, one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("an object was pickled")

    monkeypatch.setattr("torch.distributed.distributed_c10d._object_to_tensor", refuse)
    saver_of(tmp_path).save(tensors_of(1), progress_of(1))  # type: ignore[arg-type]
    found = {name: torch.zeros_like(x) for name, x in tensors_of(1).items()}
    read_tensors(complete_checkpoints(tmp_path)[0], found)
    assert torch.equal(found["weight"], tensors_of(1)["weight"])
