"""FASOP's plans in benchmarks/fasop.py: what of a row of its tables becomes a plan of ours."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import LayerStrategy, Schedule
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform

ROOT = Path(__file__).resolve().parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    fasop = importlib.import_module("fasop")


def plan_of(preset, changes, row, batch):
    model = model_of_config(read_presets()[preset].config | changes, "m", 512, preset)
    cluster = fasop.cluster_of(row, 4)
    layer = LayerStrategy(type=model.layers[0], tp_size=1, dp_size=cluster.num_devices)
    ours = plan_of_uniform(
        "ours", UniformStrategy(layer), model, cluster,
        global_batch_size=batch, num_microbatches=1, schedule=Schedule.ONE_F_ONE_B,
    )  # fmt: skip
    return fasop.plan_of(row, ours)


def test_stages_lie_on_the_nodes_and_have_the_layers_that_fasop_says():
    """Embedding and head are layers of the first and the last stage; the cluster's last node comes first."""
    row = fasop.Row(4, 1, 2, ("A100", "A10", "A10", "A10"), (4, 3, 3, 3, 3, 3, 4, 3), 0.85)
    plan = plan_of("bert-large", {"mask_token_id": 103}, row, 256)
    assert [stage.layers[0] for stage in plan.stages] == [
        (0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 18), (18, 22), (22, 24),
    ]  # fmt: skip
    a10, a100 = set(range(12)), set(range(12, 16))
    assert {rank for stage in plan.stages[:2] for rank in stage.ranks} == a100
    assert {rank for stage in plan.stages[2:] for rank in stage.ranks} == a10
    assert (plan.num_microbatches, plan.layers[0].dp_size, plan.microbatch_samples) == (32, 2, 8)


def test_the_embedding_of_t5s_decoder_is_not_a_layer_of_ours():
    row = fasop.Row(2, 1, 4, ("A10",) * 2, (26, 24), 1.0)
    plan = plan_of("t5-3b", {"vocab_size": 30522}, row, 128)
    assert [stage.layers[0] for stage in plan.stages] == [(0, 24), (24, 48)]


def test_of_a_table_the_fastest_plan_that_fits_is_read(tmp_path):
    head = "mbs,tp,dp,pp,node placement,partition,estimated time (s/step),is_oom"
    lines = [
        head,
        "8,1,8,1.0,\"['g5.24xlarge', 'g5.24xlarge']\",[26],0.5,True",
        "4,2,4,1.0,\"['p4d.24xlarge', 'g5.24xlarge']\",[26],0.75,False",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert fasop.read_row(tmp_path / "t.csv") == fasop.Row(4, 2, 4, ("A100", "A10"), (26,), 0.75)


@pytest.mark.parametrize("text", ["", "mbs,is_oom\n4,True\n", "other\n1\n"])
def test_a_table_without_a_plan_that_fits_is_refused(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadInput, match=r"t\.csv: has no plan that fits"):
        fasop.read_row(tmp_path / "t.csv")


def test_without_the_tables_it_ends_with_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/fasop.py"), "--reference", "nowhere"]
    called = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert called.returncode == 2 and called.stderr.count("\n") == 1
    assert called.stderr.startswith("error: nowhere/results/head_rerun_bert.csv: does not exist: give ")


@pytest.mark.parametrize("table", [*fasop.TABLES])
def test_each_table_has_a_model(table):
    assert table.partition("_")[0] in fasop.MODELS
