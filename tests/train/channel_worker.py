"""Run by the launcher, one process per rank: values and errors that ranks of a world exchange."""

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from forged_rank import broadcast_pickle, gather_pickle

from shardwright.io import BadInput, RunFailed
from shardwright_train.parallel.world import Channel, GroupChannel, joined_world


def main(unpickled: str) -> None:
    """Exchange in the world's own group, and in another; `unpickled` is created by who reads a pickle."""
    with joined_world("cpu") as world:
        for channel in (world, GroupChannel(torch.device("cpu"), dist.new_group(backend="gloo"))):
            _exchange(channel, world.rank, world.size)
        _send_pickles(world, world.rank, Path(unpickled))


def _exchange(channel: Channel, rank: int, size: int) -> None:
    # Of another length on each rank, none on the second, and more than a text of one byte a letter.
    told = ["é" * 1000 * (place != 1) + str(place) * place for place in range(size)]
    assert channel.all_say({told[rank]: rank}, dict[str, int]) == [{text: i} for i, text in enumerate(told)]
    assert channel.first_says(lambda: (told[0], rank), tuple[str, int]) == (told[0], 0)
    channel.agree(None)
    assert channel.together(lambda: rank) == rank
    try:
        channel.together(lambda: _fail(rank))
    except BadInput as error:
        assert error.args == ("rank 1", "fails", "look there")
    else:
        raise AssertionError("ranks 1 and above fail")
    try:
        channel.first_does(lambda: _fail(1))
    except BadInput as error:
        assert error.args[0] == "rank 1"
    else:
        raise AssertionError("rank 0 fails")


def _send_pickles(channel: Channel, rank: int, unpickled: Path) -> None:
    """Send pickles from rank 0, then from rank 1, where the other ranks wait for values."""
    for sender, send, receive in (
        (0, broadcast_pickle, lambda: channel.first_says(lambda: "", str)),
        (1, gather_pickle, lambda: channel.agree(None)),
    ):
        try:
            send(unpickled) if rank == sender else receive()
        except msgspec.DecodeError:
            assert rank != sender
        else:
            assert rank == sender, "a pickle is no value"


def _fail(rank: int) -> None:
    if rank == 1:
        raise BadInput("rank 1", "fails", "look there")
    if rank:
        raise RunFailed("a rank behind it")


if __name__ == "__main__":
    main()
