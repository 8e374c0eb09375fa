"""Which nodes to rent: fronts against every plan, files and limits."""

import csv
import json
import re
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path

import jsonschema
import pytest
import yaml
from command_calls import call as call_app
from hostile_names import NAME, PLAIN, Page, renamed
from made_up import make_hardware, make_mixed_cluster, make_request
from place_schemas import SKYPILOT
from random_fronts import front_mistakes
from rest_long import rest_long
from test_search_mixed import FILE, SLOWNESS, every_plan, profiles_of

from shardwright.display.svg import document
from shardwright.io import BadInput, read_document, write_document
from shardwright.io.hdf5 import read_profile
from shardwright.types import GIB, Cluster, Model, Plan, Prediction
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright.types.model_profile import write_model_profile
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.rent.front import Prices, find_front, sub_clusters
from shardwright_search.rent.table import FrontFile, FrontWords, Status, SubClusterRow, draw_front, front_page
from shardwright_search.space.request import Offer, Offers

call = partial(call_app, APP)


@pytest.mark.parametrize("seeds", rest_long(1, (range(3), range(3, 6))))
def test_random_fronts_are_those_of_all_plans(seeds):
    assert front_mistakes(seeds, kinds=12) == {}


def test_a_front_that_takes_every_limit_for_that_of_the_fastest_is_caught(monkeypatch):
    """Points that are slower and cheaper matter."""
    monkeypatch.setattr(
        Prices, "limit_of", lambda self, _: min((p.step_s for p in self.front.values()), default=inf) * 1e12
    )
    assert any(front_mistakes(range(seed, seed + 1), kinds=12) for seed in range(6))


def priced(**nodes: tuple[int, int]) -> Cluster:
    """A mixed cluster, each node type with a price by its speed and a half more for the fastest."""
    cluster = make_mixed_cluster(**{name: (*own, GIB) for name, own in nodes.items()})
    types = {
        name: type_.__class__(
            device=type_.device,
            devices_per_node=type_.devices_per_node,
            memory_bytes=type_.memory_bytes,
            usd_per_hour=round(3.6 / SLOWNESS[name] ** 1.3, 3),
        )
        for name, type_ in cluster.node_types.items()
    }
    return Cluster(name="priced", nodes=cluster.nodes, node_types=types)


def asked(**changes: object):
    usual = {
        "global_batch_size": 4,
        "num_microbatches": [1, 4],
        "schedules": ["1f1b"],
        "data_parallel": ["ddp", "zero3"],
        "recompute": ["none"],
        "sequence_parallel": ["none"],
        "tp_sizes": [1],
        "stage_widths": "any",
        "objective": "step_time",
    }
    return make_request(**usual | changes)


@pytest.mark.parametrize("widths", ["any", "equal"])
@pytest.mark.parametrize("seed", rest_long(2, range(3)))
def test_the_front_over_sub_clusters_is_that_of_all_plans_on_all_of_them(make, seed, widths):
    nodes = [{"a": (2, 1), "b": (2, 1)}, {"a": (1, 1), "b": (1, 2)}, {"a": (1, 1), "b": (1, 1), "c": (1, 1)}][seed]
    model, cluster, request = make.model(2, tied=bool(seed % 2)), priced(**nodes), asked(stage_widths=widths)
    profiles = profiles_of(model, cluster, dict.fromkeys(nodes, 1e8), tp_sizes=(1,))
    offered = sub_clusters(cluster, Offers(), FILE, FILE)
    front = find_front(request, model, offered, profiles, FILE, lambda _: None)
    points = []
    for own in offered:
        plans = every_plan(request, model, own.cluster)
        best_s = min(evaluate(plan, profiles, timeline=False).objective_ps for plan in plans) * 1e-12
        points.append((best_s, best_s / 3600 * own.usd_per_hour))
    on_front = [
        number
        for number, (time, usd) in enumerate(points)
        if not any(t <= time and p <= usd and (t, p) != (time, usd) for t, p in points)
    ]
    assert sorted(front.points) == on_front and not front.stopped
    for number in front.points:
        assert front.answers[number].price[:2] == pytest.approx(points[number], rel=1e-9)
    for number, answer in enumerate(front.answers):
        assert answer.price.step_s <= points[number][0] * (1 + 1e-9)
    assert len(on_front) > 1


@pytest.fixture
def given(make, tmp_path):
    """Paths by role of a search over up to 2 and 1 nodes."""
    model, cluster = make.model(3), priced(a=(2, 2), b=(1, 2))
    paths = {"cluster": tmp_path / "c.json", "model": tmp_path / "model.json", "search": tmp_path / "s.json"}
    write_document(paths["cluster"], cluster)
    write_document(paths["model"], model)
    write_document(paths["search"], asked(stage_widths="equal"))
    for device in "ab":
        write_hardware_profile(tmp_path / f"{device}-links.h5", make_hardware(cluster, device=device))
        profile = make.profile(model, device=device, slow=SLOWNESS[device], tp_sizes=(1,))
        write_model_profile(tmp_path / f"{device}.h5", profile)
    return paths | {"out": tmp_path / "front"}


def rented(given, *more: object):
    folder = given["cluster"].parent
    profiles = [x for d in "ab" for x in ("--hardware", folder / f"{d}-links.h5", "--profile", folder / f"{d}.h5")]
    return call("rent", *[x for role, path in given.items() for x in (f"--{role}", path)], *profiles, *more)


def test_the_front_is_written_with_a_plan_for_each_point(given):
    result = rented(given, "--steps", 1000, "--deadline", 10, "--price", 10)
    assert result.exit_code == 0, result.output
    with (given["out"] / "front.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = read_profile(given["out"] / "front.h5", FrontFile).sub_clusters.rows
    assert [row["nodes"] for row in rows] == [row.nodes for row in table]
    assert sorted(row["nodes"] for row in rows) == ["1xa", "1xa+1xb", "1xb", "2xa", "2xa+1xb"]
    points = [row for row in table if row.status is Status.FRONT]
    assert points and all(re.search(rf"│ {re.escape(row.nodes)} +│", result.stdout) for row in points)
    waiting = [line for line in result.stderr.splitlines() if "configurations left" in line]
    assert re.search(r" ms a step, about \d+ s left$", waiting[-2]) and "about" not in waiting[0]
    for row in points:
        plan = read_document(given["out"] / row.plan, Plan)
        prediction = read_document((given["out"] / row.plan).with_suffix(".prediction.json"), Prediction)
        assert prediction.plan_sha256 == plan.sha256 and prediction.proof.gap == 0
        assert prediction.proof.objective_s == row.step_s and "closed form alone" in prediction.proof.scope
        assert prediction.estimate.simulated_step_time_s == row.simulated_step_s
        assert row.usd_per_step == pytest.approx(row.step_s / 3600 * row.usd_per_hour)
        assert row.hours == pytest.approx(row.step_s / 3.6)
    others = [row for row in table if row.status is Status.DOMINATED]
    by_name = {row.nodes: row for row in points}
    assert others
    for row in others:
        by = by_name[row.dominated_by]
        assert by.step_s <= row.step_s and by.usd_per_step <= row.usd_per_step
    cheapest, fastest = min(points, key=lambda row: row.usd), min(points, key=lambda row: row.hours)
    assert f"cheapest within 10 h: {cheapest.nodes}," in result.stdout
    assert f"fastest within 10 USD: {fastest.nodes}," in result.stdout
    assert (given["out"] / "front.svg").read_text().count("<title>") >= len(points)
    page = (given["out"] / "front.html").read_text()
    assert not re.search(r"""src\s*=|href\s*=(?!"#)|@import|<script""", page)
    model = read_document(given["model"], Model).name
    assert f"<h1>{model} on rented nodes of" in page and "Points of the front, the fastest first</a>" in page
    assert re.search(rf'<p class="first">To train {model}, (rent )?\S+[ :]', page)
    assert all(f">{row.nodes}</td>" in page for row in table)


def test_names_are_texts_in_the_pages_of_a_front(given):
    rented(given)
    rows = read_profile(given["out"] / "front.h5", FrontFile).sub_clusters.rows
    plans = [read_document(given["out"] / row.plan, Plan) for row in rows if row.plan]
    names = {name for row in rows for name in (row.nodes, row.dominated_by)} - {""} | {"block", "cluster", "model"}

    def drawn(name):
        told, (plan, *_) = renamed((tuple(rows), tuple(plans)), names, name)
        drawing = draw_front(told, frozenset({name}), name)
        page = front_page(told, {name: plan}, drawing, FrontWords(name, name, [name]))
        return [Page(document(drawing)), Page(page)]

    for before, after in zip(drawn(PLAIN), drawn(NAME), strict=True):
        assert after.elements == before.elements and any(NAME in text for text in after.texts)


def test_a_node_type_whose_name_leads_out_of_the_folder_is_refused(given, tmp_path):
    write_document(given["cluster"], renamed(read_document(given["cluster"], Cluster), {"a"}, "/../../elsewhere"))
    ended = rented(given)
    assert ended.exit_code == 2 and not list(tmp_path.parent.glob("elsewhere*")) and not given["out"].exists()
    assert "node type '/../../elsewhere' contains a '/', but plan files are named after node types" in ended.stderr


def test_names_of_points_never_lie_over_one_another_and_chosen_ones_are_there():
    zero = dict.fromkeys(("simulated_step_s", "usd_per_hour", "hours", "usd"), 0.0)
    rows = tuple(
        SubClusterRow(
            nodes=f"{number}xa+{number}xb", status=Status.FRONT, is_bound=False, step_s=1 + number / 50,
            usd_per_step=2 - number / 50, dominated_by="", plan="", **zero,
        )
        for number in range(1, 9)
    )  # fmt: skip
    drawn = draw_front(rows, frozenset({"5xa+5xb"}), "a <model>")
    assert all(f">{label}</text>" in drawn for label in ("a &lt;model&gt;", "seconds a step", "USD a step"))
    named = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" font-size="10" font-weight="(\w+)">(.*?)<', drawn)
    assert ("bold", "5xa+5xb") in [one[2:] for one in named] and 1 < len(named) < 8
    boxes = [(float(x), float(x) + 6 * len(nodes), float(y)) for x, y, _, nodes in named]
    for one, other in combinations(boxes, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= 10
    assert drawn.count("<title>") == 8


def test_a_front_that_is_stopped_at_once_has_a_plan_for_all_nodes_and_says_what_is_open(given):
    result = rented(given, "--time-limit", 1e-9)
    assert result.exit_code == 0, result.output
    with (given["out"] / "front.csv").open() as file:
        status = {row["nodes"]: row["status"] for row in csv.DictReader(file)}
    assert status == dict.fromkeys(["1xa", "1xa+1xb", "1xb", "2xa"], "open") | {"2xa+1xb": "front"}
    assert "stopped: plans above 0 s a step of 5 sub-clusters may be missing" in result.stdout
    assert read_document(given["out"] / "2xa+1xb.json", Plan).cluster.num_devices == 6


def test_nothing_is_left_where_no_plan_fits(given):
    search = json.loads(given["search"].read_text())
    given["search"].write_text(json.dumps(search | {"memory_gib": 1e-6}))
    for more in ((), ("--time-limit", 1e-9)):
        result = rented(given, *more)
        assert result.exit_code == 3 and result.stderr.splitlines()[-1].startswith("error: ")
        assert not given["out"].exists()


def test_a_limit_that_no_point_is_within_says_by_how_much(given):
    result = rented(given, "--steps", 1000, "--deadline", 1e-9)
    assert result.exit_code == 3
    assert "error: --deadline 1e-09: the fastest, " in result.stderr and "h more" in result.stderr
    assert (given["out"] / "front.csv").exists()


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ({"node_types": {"x": {}}}, "names 'x', cluster priced has a, b"),
        ({"node_types": {"a": {"counts": [3]}}}, "counts of a: 3 nodes, cluster priced has 2"),
        ({"node_types": {"a": {"counts": [0]}, "b": {"counts": [0]}}}, "there are no nodes"),
        ({"node_types": {"a": {"interruptions_per_hour": 1}}}, "interruptions_per_hour was removed: leave it out"),
    ],
)
def test_offers_that_cannot_be_are_refused(given, tmp_path, offers, message):
    path = tmp_path / "offers.json"
    path.write_text(json.dumps({"format": "shardwright.offers", "version": 1, **offers}))
    result = rented(given, "--offers", path)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("error:") == 1
    assert not given["out"].exists() or not any(given["out"].iterdir())


def test_a_folder_with_another_front_and_limits_without_a_length_are_refused(given):
    assert "--price: needs the length of the training" in rented(given, "--price", 1).stderr
    given["out"].mkdir()
    (given["out"] / "old.json").touch()
    result = rented(given)
    assert result.exit_code == 2 and "is not empty: choose a new folder" in result.stderr


def test_a_node_type_without_a_price_is_refused():
    cluster = priced(a=(1, 1))
    (own,) = cluster.node_types.values()
    free = own.__class__(device="a", devices_per_node=1, memory_bytes=GIB)
    cluster = Cluster(name="free", nodes=cluster.nodes, node_types={"a": free})
    with pytest.raises(BadInput, match=r"node type a has no usd_per_hour: add it"):
        sub_clusters(cluster, Offers(), Path("c.json"), Path("o.json"))
    (only,) = sub_clusters(cluster, Offers(node_types={"a": Offer(usd_per_hour=2.0)}), FILE, FILE)
    assert (only.name, only.usd_per_hour) == ("1xa", 2.0)


NAMED = ("rent", "gpt2-xl", "--gpus", "0-1x8:A100-80+0-1x8:A10", "--batch", 128)


def test_a_model_by_name_needs_no_file(tmp_path):
    """One line: the table, the page and the plans, by published prices; the chosen point is started on rented nodes."""
    more = ("--steps", 1000, "--deadline", 1, "--spot", "A100-80=2", "--out", tmp_path / "front")
    result = call(*NAMED, *more, "--launch", tmp_path / "start")
    assert result.exit_code == 0, result.output
    rows = {row.nodes: row for row in read_profile(tmp_path / "front/front.h5", FrontFile).sub_clusters.rows}
    assert set(rows) == {"1xA10", "1xA100-80", "1xA100-80+1xA10"}
    assert rows["1xA100-80"].usd_per_hour == 16 and rows["1xA10"].usd_per_hour == pytest.approx(8.08)
    cheapest = min((row for row in rows.values() if row.plan and row.hours <= 1), key=lambda row: row.usd)
    assert cheapest.nodes == "1xA100-80" and f"cheapest within 1 h: {cheapest.nodes}," in result.stdout
    assert result.stdout.startswith("To train gpt2-xl, ")
    for said in ("price: 2 USD a GPU hour of A100-80 (spot, given)", "spot prices: A100-80;", "price: AWS g5.xlarge"):
        assert said in result.stdout
    assert "spot prices: A100-80;" in (tmp_path / "front/front.html").read_text()
    task = yaml.safe_load((tmp_path / "start/skypilot.yaml").read_text())
    jsonschema.validate(task, SKYPILOT)
    assert task["resources"] == {"accelerators": "A100-80GB:8", "use_spot": True, "network_tier": "best"}
    assert task["num_nodes"] == 1 and "jobs launch" in (tmp_path / "start/skypilot.yaml").read_text()
    plan = read_document(tmp_path / "start/plan.json", Plan)
    assert plan == read_document(tmp_path / "front/1xA100-80.json", Plan)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("rent", "gpt2-xl"), "--gpus: is not given: write for example"),
        (("rent",), "--cluster: is not given: name a model with --gpus, or give"),
        (
            (*NAMED, "--cluster", "c.json"),
            "--cluster: cannot be combined with the model name gpt2-xl: pass the name, or files",
        ),
        ((*NAMED[:3], "8x8"), "--gpus: '8x8' is not FROM-TOxGPUS:DEVICE"),
        ((*NAMED[:3], "2-1x8:A10"), "--gpus: 2-1x8:A10: 2-1 is not a range of nodes: give the smaller number first"),
        ((*NAMED[:3], "1x8:A10+0-1x8:A10"), "--gpus: A10 appears twice"),
        ((*NAMED[:3], "0-2x8:H20", "--batch", 8), "no price of H20 is known: give --price-per-gpu-hour H20=USD"),
        ((*NAMED, "--spot", "H200=1"), "--spot: 'H200=1' names none of A100-80, A10: write DEVICE=USD"),
        ((*NAMED, "--price-per-gpu-hour", "A10=nan"), "--price-per-gpu-hour: 'A10=nan' has no price"),
        ((*NAMED, "--launch", "start"), "--launch: starts one point of the front: name it: give --deadline or --price"),
    ],
)
def test_a_line_that_is_not_whole_is_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "") and says in result.stderr and not list(tmp_path.iterdir())
