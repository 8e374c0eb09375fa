"""Every profile that hetu-galvatron 2.4.0 ships, where it is at hand: after `snakemake reference`, or wherever
SHARDWRIGHT_GALVATRON says the sdist is unpacked."""

import json
import os
import re
from pathlib import Path

import pytest

from shardwright.types.hardware_profile import Collective, CollectiveKey
from shardwright_profile.importers.galvatron.hardware import import_galvatron_hardware
from shardwright_profile.importers.galvatron.keys import (
    ACTIVATION,
    PARAMETER_SIZE,
    Forward,
    read_computation,
    read_memory,
)
from shardwright_profile.importers.galvatron.memory import figures_of_rows, model_memory, tables_of
from shardwright_profile.importers.galvatron.times import layer_times
from shardwright_profile.options import GalvatronHardwareOptions

MIB = 1024**2
ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("SHARDWRIGHT_GALVATRON", ROOT / "results" / "reference" / "hetu-galvatron")) / "galvatron"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there: run snakemake reference")

COMPUTATION = sorted(FOLDER.glob("models/*/configs/computation_profiling_*.json"))
MEMORY = sorted(FOLDER.glob("models/*/configs/memory_profiling_*.json"))
REPAIRED = {"T5/t5-3B", "llama_fa/hidden4096_head32_seqlen2048"}
"""These have times that cannot be."""


def name_of(path):
    return f"{path.parents[1].name}/{re.sub(r'^[a-z]+_profiling_bf16_', '', path.stem)}"


def parametrised(paths):
    return pytest.mark.parametrize("path", paths, ids=name_of)


def times_of(path, lengths=None):
    computation = read_computation(path)
    lengths = lengths if lengths is not None else sorted({forward.lengths for forward in computation.forwards})[0]
    return layer_times(computation, lengths, repair=name_of(path) in REPAIRED)


def test_all_fifteen_are_there():
    assert (len(COMPUTATION), len(MEMORY)) == (15, 15)


@parametrised(COMPUTATION)
def test_every_length_of_every_file_of_times_is_read(path):
    computation = read_computation(path)
    assert computation.unknown == ()
    for lengths in {forward.lengths for forward in computation.forwards}:
        times = times_of(path, lengths)
        types = {len(forward.layers) for forward in computation.forwards}
        assert {len(times.layers)} == types
        assert all(point.time_s > 0 for points in times.layers for point in points)


@parametrised(COMPUTATION)
def test_galvatrons_own_figures_agree_with_its_raw_rows_but_for_those_named(path):
    computation = read_computation(path)
    disagreeing = set()
    for (index, batch, length), given_ms in computation.layers.items():
        if batch:
            raw = _difference_ms(computation, index, batch, length)
            if given_ms != pytest.approx(raw, rel=1e-9):
                disagreeing.add((index, batch))
    for (batch, lengths), given_ms in computation.others.items():
        if given_ms != pytest.approx(_other_ms(computation, batch, lengths), rel=1e-9):
            disagreeing.add(("other", batch))
    assert disagreeing == set()
    stale = {
        "llama_hf/hidden4096_head32_seqlen2048": ("4.789", "5.491"),
        "gpt_hf/hidden4096_head32_seqlen2048": ("5.331", "4.697"),
        "gpt_fa/hidden4096_head32_seqlen2048": ("4.313", "4.489"),
    }
    named = [note for note in times_of(path).notes if "the raw rows are taken" in note]
    if name_of(path) in stale:
        assert re.search("layertype_0 is {} ms .* give {} ms".format(*stale[name_of(path)]), named[0])


def _smallest(computation, batch, lengths):
    """The row of fewest layers; of that and of twice as many Galvatron takes the difference."""
    return min(f.layers for f in computation.forwards if (f.batch, f.lengths) == (batch, lengths))


def _difference_ms(computation, index, batch, length):
    (lengths,) = {f.lengths for f in computation.forwards if f.lengths[index : index + 1] == length}
    fewer = _smallest(computation, batch, lengths)
    above = [
        f.layers
        for f in computation.forwards
        if (f.batch, f.lengths) == (batch, lengths)
        and f.layers[:index] + f.layers[index + 1 :] == fewer[:index] + fewer[index + 1 :]
        and f.layers[index] > fewer[index]
    ]
    more = min(above)
    step_ms = computation.forwards[Forward(more, batch, lengths)] - computation.forwards[Forward(fewer, batch, lengths)]
    return step_ms / (more[index] - fewer[index]) / batch


def _other_ms(computation, batch, lengths):
    fewer = _smallest(computation, batch, lengths)
    layers_ms = sum(n * batch * _difference_ms(computation, i, batch, lengths[i : i + 1]) for i, n in enumerate(fewer))
    return max(0, (computation.forwards[Forward(fewer, batch, lengths)] - layers_ms) / batch)


@parametrised(MEMORY)
def test_galvatrons_memory_tables_agree_with_their_raw_rows(path):
    memory = read_memory(path)
    assert memory.unknown == ()
    compared = 0
    for (index, sequence, length), table in memory.layers.items():
        every = {where.forward.lengths for rows in memory.ranks.values() for where in rows}
        for lengths in (found for found in every if found[index : index + 1] == length):
            raw = figures_of_rows(memory, lengths, index, sequence)
            assert (PARAMETER_SIZE, 1) in raw
            for what, mib in raw.items():
                assert table[what] == pytest.approx(mib, rel=1e-9)
                compared += what[0] == ACTIVATION
    assert compared > 0 or not memory.layers


def test_llamas_two_tables_differ_at_tp_size_1_and_are_not_mixed():
    (path,) = (path for path in MEMORY if name_of(path) == "llama_hf/hidden4096_head32_seqlen2048")
    memory = read_memory(path)
    assert tables_of(memory, None) is True
    for sequence, held in ((False, (301.28, 182.16)), (True, (430.27, 223.13))):
        taken = model_memory(memory, (), ["block"], sequence)
        found = [taken.activation("block", tp_size, recompute=False).value / MIB for tp_size in (1, 2)]
        assert found == pytest.approx(held, abs=0.005)


def test_llamas_layer_and_the_two_tables_of_collectives_are_as_documented():
    (path,) = (path for path in COMPUTATION if name_of(path) == "llama_hf/hidden4096_head32_seqlen2048")
    (point,) = (point for point in times_of(path).layers[0] if point.micro_batch_size == 2)
    assert point.time_s / 2 * 1000 == pytest.approx(5.49, abs=0.005)
    tables = FOLDER / "profile_hardware" / "hardware_configs"
    one = "1nodes_8gpus_per_node.json"
    profile = import_galvatron_hardware(
        GalvatronHardwareOptions(
            allreduce=(tables / f"allreduce_bandwidth_{one}",),
            p2p=(tables / f"p2p_bandwidth_{one}",),
            sp_time=(tables / f"sp_time_{one}",),
            overlap=tables / "overlap_coefficient.json",
            cluster="a100-1x8",
            device="A100",
            out=Path("hardware.h5"),
        )
    )
    sizes, times_s = profile.curves[CollectiveKey(Collective.ALL_REDUCE, 8, 8, True)]
    assert (sizes[-1], times_s[-1]) == (1024**3, pytest.approx(8.1409e-3))
    # Galvatron divides MiB by a bandwidth of MB, and gets 11.62.
    bandwidth = json.loads((tables / f"allreduce_bandwidth_{one}").read_text())["allreduce_size_8_consec_1"]
    assert 2 * 7 / 8 * 1024 / bandwidth == pytest.approx(11.62, abs=0.005)
    assert "8.141 ms by sp_time and 12.19 ms by bandwidth" in profile.provenance.notes


def test_swins_rest_is_negative_and_so_absent():
    (path,) = (path for path in COMPUTATION if name_of(path) == "swin/swin-huge")
    times = times_of(path)
    assert times.rest == ()
    assert "-27.35 ms left" in times.notes[-1]
