from pathlib import Path

import msgspec

from shardwright.types.model_profile import LayerRow, read_model_profile
from shardwright_profile.model.layers import falling_times


def _layers(times_s: tuple[float, ...], error_s: float) -> tuple[LayerRow, ...]:
    example = read_model_profile(Path(__file__).parents[2] / "core" / "examples" / "model_profile.h5").layers
    return tuple(
        msgspec.structs.replace(example.rows[1], micro_batch_size=size, forward_s=time_s, forward_error_s=error_s)
        for size, time_s in enumerate(times_s, 1)
    )


def test_a_time_that_falls_by_more_than_chance_is_told_in_one_sentence():
    (told,) = falling_times(_layers((0.010, 0.008, 0.020), 0.0001))
    assert told == (
        "not monotone: forward time of block tp_size 1 sequence_parallel none recompute none sequence_length 16"
        " falls from 0.01 s to 0.008 s as micro_batch_size grows from 1 to 2"
    )


def test_what_chance_explains_and_what_grows_is_not_told():
    assert list(falling_times(_layers((0.010, 0.0098, 0.020), 0.0001))) == []
    assert list(falling_times(_layers((0.010, 0.011, 0.020), 0.0))) == []
