"""Run by the launcher, one process per rank: values and errors that ranks of a world exchange."""

import torch
import torch.distributed as dist

from shardwright_formats.io import BadInput, RunFailed
from shardwright_train.parallel.channel import Channel, GroupChannel
from shardwright_train.parallel.world import joined_world


def main() -> None:
    """Exchange in the world's own group, and in another."""
    with joined_world("cpu") as world:
        for channel in (world, GroupChannel(torch.device("cpu"), dist.new_group(backend="gloo"))):
            _exchange(channel, world.rank, world.size)


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


def _fail(rank: int) -> None:
    if rank == 1:
        raise BadInput("rank 1", "fails", "look there")
    if rank:
        raise RunFailed("a rank behind it")


if __name__ == "__main__":
    main()
