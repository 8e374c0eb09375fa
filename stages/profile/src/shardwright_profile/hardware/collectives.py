"""The calls that are timed, one per kind of collective (imports torch: only the ranks of a sweep import this)."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwright_formats.semantics.sweep_plan import CollectiveKind, Groups
from shardwright_formats.types.hardware_profile import Collective


def collective_call(
    kind: CollectiveKind,
    message_bytes: int,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    wait: bool = True,
) -> Callable[[], dist.Work | None]:
    """Return a call for this rank's part of one collective of `message_bytes`, as `Collective` defines that size.

    The numbers are float32 zeros: sums of them stay zeros however often they are repeated. A rank outside all groups
    does nothing. These are the calls that FSDP2 and the tensor-parallel layers make. They are complete, or queued on
    the current stream, when they return; without `wait`, the collective goes on and its work handle is returned.
    """
    if kind.key.collective is Collective.P2P:
        return p2p_call(kind.groups, message_bytes, process_group, device)
    if process_group is None:
        return _nothing
    whole = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)
    match kind.key.collective:
        case Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=process_group, async_op=not wait)
        case Collective.ALL_GATHER:
            part = torch.zeros(whole.numel() // kind.key.group_size, dtype=whole.dtype, device=device)
            return lambda: dist.all_gather_into_tensor(whole, part, group=process_group, async_op=not wait)
        case Collective.REDUCE_SCATTER:
            part = torch.zeros(whole.numel() // kind.key.group_size, dtype=whole.dtype, device=device)
            return lambda: dist.reduce_scatter_tensor(part, whole, group=process_group, async_op=not wait)
        case Collective.ALL_TO_ALL:
            other = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=process_group, async_op=not wait)


def p2p_call(
    pairs: Groups, message_bytes: int, process_group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], None]:
    """Return a call for this rank's part of a message of `message_bytes` from the first to the second of each pair.

    `process_group` is that of this rank's pair; None where it has none.
    """
    if process_group is None:
        return _nothing
    rank = dist.get_rank()
    targets = {source: target for source, target in pairs}
    sources = {target: source for source, target in pairs}
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)
    if rank in targets:
        return lambda: _done(dist.send(message, targets[rank], process_group))
    return lambda: _done(dist.recv(message, sources[rank], process_group))


def _nothing() -> None:
    pass


def _done(_: object) -> None:
    """Drop what torch returns: these calls are complete, or queued on the current stream, when they return."""
