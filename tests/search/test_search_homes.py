"""A made-up device and a made-up optimizer go through the search, or are refused by name."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.devices.table import device_lines, read_devices
from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, optimizer_time_s
from shardwright.io import BadInput, read_document
from shardwright.optimizers.registry import ADAMW, OPTIMIZERS, Optimizer, State
from shardwright.plan.supported_fields import check_fields
from shardwright.types import GIB, LayerStrategy, Plan, Precision
from shardwright_search.advise import question as asking
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.search import find_best
from shardwright_search.space.budget import states_beyond_budget
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import space_of

TABLE = """
revised = "2026-01-31"
[devices.Zed-64]
names = ["Maker Zed 64GB"]
short_names = ["Zed"]
peaks = { float32 = 1e13, bfloat16 = 2e14 }
peaks_source = "its maker"
memory_bytes = 68_719_476_736
memory_bytes_source = "its maker"
memory_bytes_per_s = 2e12
memory_bytes_per_s_source = "its maker"
link_bytes_per_s = 1e11
link_bytes_per_s_source = "its maker"
network_bytes_per_s = 4e10
network_bytes_per_s_source = "its maker"
[devices.Bare]
names = ["Maker Bare"]
memory_bytes = 68_719_476_736
memory_bytes_source = "its maker"
"""
FILE = Path("s.json")
PLAN = Path(__file__).parents[2] / "core" / "examples" / "plan.json"
MADE_UP = Optimizer("made-up", (State("sum"), State("scale", "float16")))


@pytest.fixture
def table(tmp_path, monkeypatch):
    (tmp_path / "devices.toml").write_text(TABLE)
    made_up = read_devices(tmp_path / "devices.toml")
    monkeypatch.setattr(asking, "read_devices", lambda: made_up)
    return made_up


def test_a_made_up_device_goes_through(table):
    question = asking.question_of(AdviseOptions(model="gpt2-xl", gpus="2x4:Zed", batch=64))
    assert question.cluster.node_types["Zed-64"].device == "Maker Zed 64GB"
    assert question.budgets == {"Zed-64": int(0.92 * 64 * GIB)}
    assert {"Zed: taken for Zed-64 (--gpus)", "Maker Zed 64GB: its maker"} <= {*question.assumed}
    assert "between nodes: 1280 Gbit/s a node (--inter-node-gbit-s); its maker" in question.assumed
    plan = question.setting.plan(question.setting.uniform("mine", 1), "mine")
    assert evaluate(plan, question.profiles).estimate.simulated_step_time_s > 0
    assert "  network, GB/s: 40 [its maker]" in device_lines(table)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("8:Zeta", "--gpus: 'Zeta' is not in the table of devices"),
        ("2x8:Bare", "what nodes of Bare send is not known"),
        ("8:Bare", "--precision: the table has no rate for bfloat16 products of Bare"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_device_without_figures_is_refused_by_name(gpus, said):
    with pytest.raises(BadInput, match=said):
        asking.question_of(AdviseOptions(model="gpt2-xl", gpus=gpus, batch=64))


def test_a_made_up_optimizer_goes_through(make):
    """It keeps 6 bytes of a parameter in float32, AdamW 8: in a layer, in the proof that nothing fits, in a step."""
    model, cluster = make.model(), make.cluster(4)
    request = make.request(memory_gib=2**20 / GIB)
    usual = space_of(request, model, cluster, make.profiles(model, cluster), FILE).instance
    other = Instance.made(usual.request, replace(usual.costs, optimizer=MADE_UP), usual.budgets)
    strategy = LayerStrategy(type="block", tp_size=1, dp_size=2)
    asked = "block", strategy, StageTopology("n", (2,)), 2, True
    held, less = (each.costs.layer(*asked).memory for each in (usual, other))
    parameters = model.types["block"].parameter_count()
    assert (held.optimizer, less.optimizer) == (8 * parameters, 6 * parameters)
    assert replace(held, optimizer=0) == replace(less, optimizer=0)
    spared = states_beyond_budget(usual) - states_beyond_budget(other)
    assert spared == pytest.approx(2 * model.trained_count / 4, abs=1)
    timed = model.types["block"], 1, Precision(), Machine(1e12, 1e11, Link(1e9, 1e-6))
    spared_s = optimizer_time_s(*timed) - optimizer_time_s(*timed, MADE_UP)
    assert spared_s == pytest.approx(2 * 2 * parameters / 1e11)


def test_an_optimizer_that_is_not_priced_is_refused_by_name(make, tmp_path):
    timed = make.model().types["block"], 1, Precision(), Machine(1e12, 1e11, Link(1e9, 1e-6))
    with pytest.raises(BadInput, match="optimizer made-up: updates whole matrices, which the estimate of a step does"):
        optimizer_time_s(*timed, MADE_UP._replace(whole_matrices=True))
    plan, wrong = PLAN, tmp_path / "plan.json"
    assert read_document(plan, Plan).optimizer == ADAMW.name
    wrong.write_text(json.dumps(json.loads(plan.read_text()) | {"optimizer": "made-up"}))
    with pytest.raises(BadInput, match=r"'made-up'.*optimizer"):
        read_document(wrong, Plan)


def test_a_plan_with_an_optimizer_is_priced_and_refused_by_what_does_not_run_it(make, monkeypatch):
    """Without a word in it, the runtime and exports would run AdamW instead."""
    monkeypatch.setitem(OPTIMIZERS, MADE_UP.name, MADE_UP)
    model, cluster = make.model(), make.cluster(4)
    profiles = make.profiles(model, cluster)
    found = find_best(make.request(), model, cluster, profiles, FILE, lambda line: None)
    plan = found.chosen.plan
    other = replace(plan, optimizer=MADE_UP.name)
    usual, less = (
        evaluate(each, profiles).estimate.stages[0].memory_terms_bytes["optimizer"] for each in (plan, other)
    )
    assert less == usual * 6 // 8
    for command in ("the runtime", "the Megatron-LM export"):
        check_fields(plan, "plan.json", command)
        with pytest.raises(BadInput, match=rf"plan\.json: optimizer: {command} does not support it"):
            check_fields(other, "plan.json", command)
