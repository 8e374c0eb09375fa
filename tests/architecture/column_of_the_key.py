"""Run with a column `gp_size` added to the key: layers that differ in it alone have figures of their own everywhere."""

import sys
from pathlib import Path

from made_up import make_cluster, make_hardware, make_model

import shardwright
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.types import LayerStrategy, Precision
from shardwright.types.model_profile import (
    LayerFigures,
    LayerRow,
    ProfileOrigin,
    read_model_profile,
    write_model_profile,
)
from shardwright_profile.importers.documents import profile_of, state_row
from shardwright_search.cost_model.collectives import stage_topology
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.profiles import Scaling, index_profiles, scaled
from shardwright_search.cost_model.time_model import TimeModel

MODEL, CLUSTER = make_model(), make_cluster(2)
STRATEGIES = [LayerStrategy(type="block", tp_size=1, dp_size=2, gp_size=gp_size) for gp_size in (1, 2)]
ORIGIN = {"model": "m", "architecture_sha256": "0", "device": "cpu", "backend": "gloo", "precision": "p"}


def row(strategy: LayerStrategy, samples: int) -> LayerRow:
    """Return a row of 3 ms a sample forward, 6 ms backward and 12 bytes, or of a third of that on half a sequence."""
    part = {1: 1, 2: 3}[strategy.gp_size]
    values = (3e-3 * samples / part, 6e-3 * samples / part, 12 * samples // part, 0)
    key = LayerKey.from_fields(strategy, micro_batch_size=samples, sequence_length=MODEL.sequence_length)
    return LayerRow.from_figures(key, LayerFigures(*(Sourced(value, Source.MEASURED) for value in values)))


def main(folder: Path) -> None:
    """Write a profile of both strategies, and price a layer under each with what is read."""
    assert Path(shardwright.__file__).is_relative_to(folder)
    rows = [row(strategy, samples) for strategy in STRATEGIES for samples in (1, 2, 4)]
    origin = ProfileOrigin(**ORIGIN, attention="auto")
    states = [state_row("block", 1, Sourced(4.0, Source.MEASURED))]
    path = folder / "profile.h5"
    write_model_profile(path, profile_of(origin, Provenance(date="", versions=""), rows, states))
    read = read_model_profile(path)
    assert set(read.layers["gp_size"]) == set(read.fits["gp_size"]) == {1, 2}
    assert len(read.curves) == 2
    assert "gp_size 2" in str(LayerKey.from_fields(STRATEGIES[1]))
    profiles = index_profiles(make_hardware(CLUSTER), Path("h.h5"), read, path)
    for factor, known in ((1, profiles), (2, scaled(profiles, Scaling(forward=2.0)))):
        for time_model in (TimeModel.INTERPOLATE, TimeModel.STATIC, TimeModel.BATCH):
            costs = CostModel(MODEL, CLUSTER, known, Precision(), time_model=time_model)
            layers = [costs.layer("block", each, stage_topology(CLUSTER, range(2)), 4, False) for each in STRATEGIES]
            times_s = [round(layer.forward_ps * 1e-12, 9) for layer in layers]
            assert times_s == [factor * 6e-3, factor * 2e-3], (time_model, layers)
            assert [layer.activation_bytes // 8 for layer in layers] == [3, 1], (time_model, layers)
    print("priced by gp_size")


main(Path(sys.argv[1]))
