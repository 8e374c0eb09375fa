"""A process that is no rank of a run, takes the place of one, and sends pickles in place of values."""

import os
import pickle
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_JOINED_S = 4.0


class Touch:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def forge(port: int, joined: Path, unpickled: Path) -> None:
    """Join rank 0, whose PyTorch is to listen at a port of loopback, as rank 1 of 2, and send it a pickle.

    `joined` exists where that succeeds, `unpickled` where rank 0 reads the pickle.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=_JOINED_S)
    dist.init_process_group("gloo", init_method=place, rank=1, world_size=2, timeout=timeout)
    joined.touch()
    gather_pickle(unpickled)


def gather_pickle(unpickled: Path) -> None:
    """Send a pickle as a rank's part of a gathered object: its length first, then itself."""
    content = _pickle(unpickled)
    sizes = _gathered(torch.tensor([content.numel()]))
    parts = torch.zeros(int(torch.stack(sizes).max()), dtype=torch.uint8)
    parts[: content.numel()] = content
    _gathered(parts)


def broadcast_pickle(unpickled: Path) -> None:
    """Send a pickle as rank 0's object, likewise."""
    content = _pickle(unpickled)
    dist.broadcast(torch.tensor([content.numel()]), src=0)
    dist.broadcast(content, src=0)


def _pickle(unpickled: Path) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(Touch(unpickled))), dtype=torch.uint8)


def _gathered(mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts
