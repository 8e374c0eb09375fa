"""Plans to export, and files in Galvatron's format to import."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from shardwright.types import DataParallel, Plan, Precision, Recompute, SequenceParallel
from shardwright_search.options import GalvatronRun, UniformRequest
from shardwright_search.systems.galvatron import plan_of_galvatron, read_galvatron
from shardwright_search.uniform_plan import uniform_plan

RUN = GalvatronRun(sequence_parallel="megatron")
BASE = UniformRequest(
    global_batch_size=32,
    num_microbatches=4,
    tp_size=2,
    pp_size=2,
    data_parallel=DataParallel.ZERO2,
    sequence_parallel=SequenceParallel.MEGATRON,
    precision_compute="bfloat16",
)
"""For eight ranks: tp 2, dp 2, pp 2."""


def recomputing(plan: Plan, *which: int) -> Plan:
    """The plan that recomputes these layers and no others."""
    layers = [
        msgspec.structs.replace(layer, recompute=Recompute.FULL if i in which else Recompute.NONE)
        for i, layer in enumerate(plan.layers)
    ]
    return msgspec.structs.replace(plan, layers=tuple(layers))


def cut(plan: Plan, *sizes: int) -> Plan:
    """The plan with that many layers in each pipeline stage."""
    stages, low = [], 0
    for stage, size in zip(plan.stages, sizes, strict=True):
        stages.append(msgspec.structs.replace(stage, layers=((low, low + size),)))
        low += size
    return msgspec.structs.replace(plan, stages=tuple(stages))


def layer_changed(plan: Plan, index: int, **changes: object) -> Plan:
    """The plan with one layer's strategy changed."""
    layers = list(plan.layers)
    layers[index] = msgspec.structs.replace(layers[index], **changes)
    return msgspec.structs.replace(plan, layers=tuple(layers))


def galvatron_config(**changes: object) -> dict[str, object]:
    """A file of five layers, cut unevenly, for 16 ranks: every kind of layer that Galvatron has."""
    return {
        "pp_deg": 2,
        "tp_sizes_enc": "4,2,1,8,2",
        "tp_consecutive_flags": "0,1,1,1,1",
        "dp_types_enc": "0,1,1,0,0",
        "use_sp": "0,0,0,0,1",
        "checkpoint": "1,0,1,0,0",
        "global_bsz": 64,
        "chunks": 4,
        "pp_division": "2,3",
        "pipeline_type": "gpipe",
        "default_dp_type": "ddp",
        "vtp": 2,
        "vsp": 1,
        "embed_sdp": 1,
    } | changes


@pytest.fixture
def change() -> SimpleNamespace:
    """What tests change in a plan."""
    return SimpleNamespace(cut=cut, layer=layer_changed, plan=msgspec.structs.replace, recomputing=recomputing)


@pytest.fixture
def planned(make) -> Callable[..., Plan]:
    """A uniform plan for eight ranks, with changes to the request."""

    def plan_of(layers: int = 8, devices: int = 8, precision: Precision | None = None, **changes: object) -> Plan:
        plan = uniform_plan("base", msgspec.structs.replace(BASE, **changes), make.model(layers), make.cluster(devices))
        return plan if precision is None else msgspec.structs.replace(plan, precision=precision)

    return plan_of


@pytest.fixture
def config() -> Callable[..., dict[str, object]]:
    """A file in Galvatron's format, with changes."""
    return galvatron_config


@pytest.fixture
def read(tmp_path, make) -> Callable[..., Plan]:
    """Imports such a file for a model of as many layers and a cluster of 16 devices."""

    def plan_of(raw: dict[str, object], run: GalvatronRun = RUN, layers: int = 5, devices: int = 16) -> Plan:
        path = tmp_path / "galvatron_config.json"
        path.write_text(json.dumps(raw))
        model, cluster = make.model(layers), make.cluster(devices, 2)
        return plan_of_galvatron("imported", read_galvatron(path), model, cluster, run, path)

    return plan_of
