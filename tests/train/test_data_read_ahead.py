"""What the next steps need is read while one runs, and the reader ends with the run."""

import threading

import pytest

from shardwright.io import BadInput
from shardwright_train.data.share import read_ahead


def _readers() -> int:
    return sum(thread.name.startswith("reader") for thread in threading.enumerate())


def test_steps_come_in_order_each_once() -> None:
    with read_ahead(lambda step: step * step, range(3, 12)) as ready:
        assert list(ready) == [step * step for step in range(3, 12)]
    with read_ahead(lambda step: step, range(0)) as ready:
        assert list(ready) == []


def test_the_steps_after_one_are_read_while_it_runs_and_no_more_than_two() -> None:
    read, third = [], threading.Event()

    def reading(step: int) -> int:
        read.append(step)
        if step == 3:
            third.set()
        return step

    with read_ahead(reading, range(1, 100)) as ready:
        assert next(ready) == 1
        assert third.wait(10)
    assert read == [1, 2, 3]


def test_what_goes_wrong_in_reading_is_raised_at_the_step_that_needs_it() -> None:
    def reading(step: int) -> int:
        if step == 2:
            raise BadInput("tokens.bin", "is damaged", "prepare again")
        return step

    with pytest.raises(BadInput, match="is damaged"), read_ahead(reading, range(1, 5)) as ready:
        assert next(ready) == 1
        next(ready)
    assert not _readers()


def test_the_reader_ends_with_the_block_however_that_ends() -> None:
    with pytest.raises(KeyError), read_ahead(lambda step: step, range(1000)) as ready:
        next(ready)
        assert _readers() == 1
        raise KeyError
    assert not _readers()
