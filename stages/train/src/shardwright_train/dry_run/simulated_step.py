"""The simulated step of one rank, on tensors without data in a fake world, counting traffic and memory."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import ITEMSIZE, Plan
from shardwright_formats.types.hardware_profile import Collective
from shardwright_train.data.share import DOCUMENTS
from shardwright_train.engine.engine import build_engine
from shardwright_train.models.base import Family
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.p2p import Pipeline
from shardwright_train.pipeline.runner import MicrobatchChunk, Step
from shardwright_train.torch_private import FakeStore, FakeTensorMode, TorchDispatchMode, tree_leaves

# The argument that holds the full tensor of each.
_COLLECTIVES = {
    "c10d::allreduce_": (Collective.ALL_REDUCE, 0),
    "c10d::_allgather_base_": (Collective.ALL_GATHER, 0),
    "c10d::_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "c10d::alltoall_base_": (Collective.ALL_TO_ALL, 1),
    "c10d::send": (Collective.P2P, 0),
}


class Traffic(NamedTuple):
    """A kind of communication."""

    collective: Collective
    group_size: int


class SimulatedStep(NamedTuple):
    """The traffic and memory of one simulated step of a rank."""

    message_bytes: Mapping[Traffic, int]
    """Bytes of all messages of a kind, as `hardware_profile.Collective` counts them; of sends by the sender."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Peak of resident tensor memory in bytes, parameters, gradients and optimizer state included."""
    received_bytes: int
    """Bytes of a microbatch's inputs of all chunks, received while the previous action computes."""
    resident_bytes: Mapping[tuple[str, MicrobatchChunk], int]
    """Resident bytes at each event of a pass, without ZeRO-3's gathered parameters; see `StepHook`."""

    @property
    def activation_bytes(self) -> int:
        """Return the bytes that the last microbatch's forward pass kept in a chunk, input included (mean of chunks)."""
        last = max(at for _, at in self.resident_bytes)[0]
        ends = {at: size for (name, at), size in self.resident_bytes.items() if (name, at[0]) == ("forward.end", last)}
        left = [size - self.resident_bytes["forward.wait", at] for at, size in ends.items()]
        return (sum(left) + self.received_bytes) // len(left)


def simulate_step(
    plan: Plan, rank: int, family: Family, attention: str, reset_attention_mask: bool = False
) -> SimulatedStep:
    """Build a rank's pipeline stage as every command does, and run one step of it without data or other ranks.

    With `reset_attention_mask` its samples tell their documents apart.
    """
    device = torch.device("cpu")
    with _simulated_world(rank, plan.world_size):
        context = RankContext(
            plan=plan, family=family, rank=rank, groups=Groups("cpu"), attention=attention, device=device, seed=None
        )
        engine = build_engine(context)
        generator = torch.Generator().manual_seed(0)
        batch = family.learns(plan.model).random_batch(plan.global_batch_size, generator)
        if reset_attention_mask:
            batch[DOCUMENTS] = torch.zeros_like(batch["tokens"])
        step = Step.of_batch(batch, context.share)
        resident, sent = _ResidentBytes(), _SentBytes()
        events: dict[tuple[str, MicrobatchChunk], int] = {}

        def hook(name: str, at: MicrobatchChunk | None = None) -> None:
            if at is not None:
                events[name, at] = resident.now - engine.stage.gathered_bytes

        with FakeTensorMode(allow_non_fake_inputs=True):
            for chunk in engine.stage.chunks:
                chunk.to_empty(device=device)
            for parameter in engine.stage.parameters_by_name().values():
                resident.follow(parameter)
            parameters = resident.now
            with resident:
                optimizer, with_optimizer = engine.optimizer, resident.now
                with sent:
                    engine.forward_backward(step, hook)
            gradients = sum(_gradient_bytes(p) for p in optimizer.parameters.values() if p.requires_grad)
        return SimulatedStep(
            message_bytes=dict(sent.bytes),
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=with_optimizer - parameters,
            peak_bytes=resident.peak,
            received_bytes=_received_numel(engine.pipeline) * ITEMSIZE[plan.precision.compute],
            resident_bytes=events,
        )


def _received_numel(pipeline: Pipeline) -> int:
    ports = (port for (kind, _), port in pipeline.incoming.items() if kind is Pass.FORWARD)
    return sum(prod(shape) for port in ports for shape in port.shapes)


@contextmanager
def _simulated_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _SentBytes(TorchDispatchMode):
    """A counter of the bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[Traffic] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in _COLLECTIVES:
            collective, which = _COLLECTIVES[func.name()]
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            key = Traffic(collective, 2 if collective is Collective.P2P else size)
            self.bytes[key] += sum(x.nbytes for x in tree_leaves(args[which]))
        return func(*args, **(kwargs or {}))


class _ResidentBytes(TorchDispatchMode):
    """A tracker of the storages that operations make, until nothing refers to them any more.

    FSDP empties and refills storages that it keeps, which no operation shows: their sizes are asked for anew whenever
    the sum seems to reach a peak, and when it is asked for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._sum = 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Return the bytes resident now."""
        for key, (ref, _) in list(self._storages.items()):
            storage = ref()
            if storage is not None:
                self._storages[key] = ref, storage.nbytes()
        self._sum = sum(size for _, size in self._storages.values())
        self.peak = max(self.peak, self._sum)
        return self._sum

    def follow(self, x: Tensor) -> None:
        """Count a tensor's storage from now on."""
        # A DTensor itself pretends to a storage of the whole tensor.
        storage = local_tensor(x).untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
            self._sum += storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.follow(x)
        if self._sum > self.peak:
            _ = self.now
        return result

    def _forget(self, key: int) -> None:
        self._sum -= self._storages.pop(key)[1]


def _gradient_bytes(parameter: nn.Parameter) -> int:
    assert parameter.grad is not None
    return local_tensor(parameter.grad).nbytes
