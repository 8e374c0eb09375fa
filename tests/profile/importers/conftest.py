"""Small files in Galvatron's grammar, made up so that every number can be had by hand."""

import json

import msgspec
import pytest

from shardwright.io.table import Source
from shardwright.types.hardware_profile import Collective, CollectiveKey, write_hardware_profile
from shardwright_profile.importers.documents import FlatType, flat_model, hardware_profile, link_points
from shardwright_profile.importers.galvatron.keys import read_computation, read_memory
from shardwright_profile.importers.galvatron.model import GalvatronRequest, Hardware
from shardwright_profile.options import GalvatronOptions

MIB = 1024**2
BATCHES = (1, 2, 4)
TYPES = (FlatType("block", 4, 32, 16, 8),)


def layer_ms(batch):
    return 1 + 2 * batch


def rest_ms(batch):
    return 3 + batch


TIMES = {
    f"layernum[{layers}]_bsz{batch}_seq32": layers * layer_ms(batch) + rest_ms(batch)
    for layers in (2, 4)
    for batch in BATCHES
} | {f"layertype_0_bsz{batch}_seq32": layer_ms(batch) / batch for batch in BATCHES}

RAW = {f"layernum[{n}]_bsz8_seq32_rank0_{kind}": size for n, ms, act in ((1, 20, 50), (2, 36, 90))
       for kind, size in (("ms", ms), ("act", act), ("act_peak", 99))}  # fmt: skip
MEMORY = {
    "1_1_2": RAW,
    "1_2_1": RAW,
    "1_1_2_sp": RAW,
    "1_2_1_sp": RAW,
    "layertype_0": {
        "32": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 6.0, "4": 3.0, "checkpoint": 1.0}}
    },
    "layertype_0_sp": {
        "32": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 5.0, "checkpoint": 1.0}}
    },
    "other_memory_pp_off": {"32": {"model_states": {"1": 64.0, "2": 40.0}, "activation": {"1": 20.0, "2": 12.0}}},
    "other_memory_pp_off_sp": {"32": {"model_states": {"1": 64.0, "2": 32.0}, "activation": {"1": 20.0, "2": 11.0}}},
}


@pytest.fixture
def times_file():
    """Of layers that take 1 + 2b ms in a model whose rest takes 3 + b."""
    return dict(TIMES)


@pytest.fixture
def memory_file():
    """Its raw rows agree with its tables."""
    return json.loads(json.dumps(MEMORY))


@pytest.fixture
def request_for(tmp_path):
    """What to import of files with this content; strings are written as they are."""

    def made(times=TIMES, memory=MEMORY, types=TYPES, **replaced):
        files = {"times.json": times, "memory.json": memory}
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        sizes = {kind.name: 8.0 * MIB for kind in types} | {"embedding": 8.0 * MIB, "head": 8.0 * MIB}
        models = replaced.pop("models", (flat_model("toy", "galvatron", types, sizes, {}),))
        hardware = replaced.pop("hardware", None)
        named = {"computation": tmp_path / "times.json", "memory": tmp_path / "memory.json", "out": tmp_path / "x.h5"}
        spelled = {key: ",".join(map(str, v)) if isinstance(v, tuple) else v for key, v in replaced.items()}
        options = GalvatronOptions(device="A100", backward_ratio=2.5, **named, **spelled)
        return GalvatronRequest(
            options, read_computation(options.computation), read_memory(options.memory), models, hardware
        )

    return made


@pytest.fixture
def hardware(tmp_path):
    """All-reduce among 2 at 1 MB/s as a whole; gather and scatter take half of it."""
    reduce = CollectiveKey(Collective.ALL_REDUCE, 2, 2, True)
    points = list(link_points(reduce, 1e6, Source.DERIVED))
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        points += link_points(CollectiveKey.from_fields(reduce, collective=collective), 1e6, Source.DERIVED)
    profile = hardware_profile("toys", "A100", [], points, None)
    write_hardware_profile(tmp_path / "hardware.h5", profile)
    return Hardware(tmp_path / "hardware.h5", profile)


def _rows_of(profile):
    """By type, tp_size, sequence parallelism, recompute and micro-batch."""
    table = profile.layers
    names = ("type", "tp_size", "sequence_parallel", "recompute", "micro_batch_size")
    rows = [msgspec.structs.asdict(row) for row in table.rows]
    return {tuple(row[name] for name in names): row for row in rows}


def _states_of(profile):
    table = profile.states
    return {(row.type, row.tp_size): msgspec.structs.asdict(row) for row in table.rows}


@pytest.fixture
def rows_of():
    return _rows_of


@pytest.fixture
def states_of():
    return _states_of
