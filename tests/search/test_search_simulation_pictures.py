"""The command `simulate`: what it prints, its picture and its trace."""

import json
import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import msgspec
import pytest
from command_calls import call as call_app

from shardwright.display.svg import document
from shardwright.display.timeline import draw_timeline, idle_s
from shardwright.io import write_document
from shardwright.types import LayerStrategy, PipelineStage, Plan, Schedule, Strategy, TimelineEvent
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import read_profiles
from shardwright_search.simulation.simulator import chrome_trace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plan(make):
    """Two pipeline stages of two chunks, a rank each."""
    model, one = make.model(4), {"tp_size": 1, "dp_size": 1}
    return Plan(
        name="two <by> two",
        model=model,
        cluster=make.cluster(2),
        global_batch_size=4,
        num_microbatches=4,
        schedule=Schedule.INTERLEAVED_1F1B,
        stages=(
            PipelineStage(ranks=(0,), layers=((0, 1), (2, 3))),
            PipelineStage(ranks=(1,), layers=((1, 2), (3, 4))),
        ),
        embedding=Strategy(**one),
        head=Strategy(**one),
        layers=tuple(LayerStrategy(type=name, **one) for name in model.layers),
    )


@pytest.fixture
def estimate(make, plan):
    return evaluate(plan, make.profiles(plan.model, plan.cluster)).estimate


@pytest.fixture
def reducing(estimate):
    """The same with a reduction beside the last backward pass of stage 0, half as long."""
    (*_, last) = (e for e in estimate.timeline if e.stage == 0 and e.kind == "backward")
    middle_s = (last.start_s + last.end_s) / 2
    overlapped_time = msgspec.structs.replace(last, kind="gradient_sync", microbatch=None, start_s=middle_s)
    return msgspec.structs.replace(estimate, timeline=(*estimate.timeline, overlapped_time))


@pytest.fixture
def call(plan, make, files, tmp_path):
    """Run the command on the plan."""
    paths = files(plan.model, plan.cluster, make.request(), make.profile(plan.model))
    write_document(tmp_path / "plan.json", plan)

    def run(*options, hardware=paths["hardware"]):
        known = ["--hardware", hardware, "--profile", paths["profile"]]
        return call_app(APP, "simulate", tmp_path / "plan.json", *known, *options)

    run.profiles = read_profiles([paths["hardware"]], [paths["profile"]])
    return run


def test_simulate_prints_the_step_its_bounds_and_how_much_each_stage_idles(call, plan):
    found = evaluate(plan, call.profiles).estimate
    result = call()
    assert result.exit_code == 0, result.output
    times = (found.simulated_step_time_s, found.simulated_lower_bound_s, found.objective_s)
    step, bound, closed = (f"{time_s * 1e3:.3f} ms" for time_s in times)
    assert f"simulated step {step}, lower bound {bound}, closed form {closed}" in result.output
    end_s = max(event.end_s for event in found.timeline)
    shares = re.findall(r"\(([\d.]+)%\) │$", result.output, re.MULTILINE)
    assert [float(share) for share in shares] == [
        round(100 * idle_s(found.timeline, i, end_s) / end_s, 1) for i in (0, 1)
    ]


def test_picture_and_trace_are_written_and_the_same_each_time(call, tmp_path):
    files = tmp_path / "a" / "t.svg", tmp_path / "a" / "t.json"
    written = []
    for _ in range(2):
        assert call("--svg", files[0], "--trace", files[1]).exit_code == 0
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]
    assert ElementTree.fromstring(written[0][0]).tag == f"{SVG}svg"
    assert json.loads(written[0][1])["traceEvents"]


def test_neither_picture_nor_trace_appears_where_one_cannot_be_written(call, tmp_path):
    (tmp_path / "t.json").mkdir()
    result = call("--svg", tmp_path / "t.svg", "--trace", tmp_path / "t.json")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "t.json: is a folder" in result.stderr
    assert not (tmp_path / "t.svg").exists()


def test_a_missing_profile_exits_with_2_and_writes_nothing(call, tmp_path):
    result = call("--svg", tmp_path / "t.svg", hardware=tmp_path / "none.h5")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert not (tmp_path / "t.svg").exists()


def test_the_trace_holds_every_event_for_as_long_as_it_takes(plan, reducing):
    trace = json.loads(json.dumps(chrome_trace(plan, reducing)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(reducing.timeline)
    sums = Counter()
    for event in spans:
        sums[event["pid"], event["cat"]] += event["dur"]
    wanted = Counter()
    for event in reducing.timeline:
        wanted[event.stage, event.kind] += (event.end_s - event.start_s) * 1e6
    assert sums == pytest.approx(wanted, rel=1e-9)
    assert {"forward", "backward", "gradient_sync", "send_forward", "send_backward"} < {kind for _, kind in sums}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(max(e.end_s for e in reducing.timeline) * 1e6)


def test_the_trace_names_its_lanes_and_nothing_overlaps_in_one(plan, reducing):
    events = chrome_trace(plan, reducing)["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [names["process_name", stage, 0] for stage in (0, 1)] == ["stage 0, ranks 0", "stage 1, ranks 1"]
    lanes = {(e["pid"], e["tid"]): [] for e in events if e["ph"] == "X"}
    assert set(lanes) == {(pid, tid) for what, pid, tid in names if what == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for own in lanes.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(own)))


def bars(drawing):
    """Title, place and fill of the rectangle of each event."""
    found = []
    for bar in ElementTree.fromstring(drawing).iter(f"{SVG}rect"):
        if (title := bar.find(f"{SVG}title")) is not None:
            place = (float(bar.get(name)) for name in ("x", "width", "y", "height"))
            found.append((title.text, *place, bar.get("fill")))
    return found


def test_the_picture_shows_every_event_where_it_is_and_nothing_over_another(plan, reducing):
    shown = bars(document(draw_timeline(plan, reducing)))
    assert len(shown) == len(reducing.timeline)
    end_s = max(event.end_s for event in reducing.timeline)
    left = min(x for _, x, *_ in shown)
    right = max(x + width for _, x, width, *_ in shown)
    device_groups = sorted((round(x - left, 1), round(width, 1)) for _, x, width, *_ in shown)
    scale = (right - left) / end_s
    wanted = sorted((round(e.start_s * scale, 1), round((e.end_s - e.start_s) * scale, 1)) for e in reducing.timeline)
    assert [time for place in device_groups for time in place] == pytest.approx(
        [time for place in wanted for time in place], abs=0.11
    )
    for one in range(len(shown)):
        for other in range(one):
            (_, x, width, y, height, _), (_, u, breadth, v, depth, _) = shown[one], shown[other]
            overlap = min(x + width, u + breadth) - max(x, u), min(y + height, v + depth) - max(y, v)
            assert min(overlap) < 0.01, (shown[one], shown[other])


def test_the_picture_stands_alone_and_tells_chunks_apart(plan, reducing):
    drawing = document(draw_timeline(plan, reducing))
    assert not re.search(r"""(src|href)\s*=|@import|url\(|<script""", drawing)
    assert "two &lt;by&gt; two" in drawing and "prefers-color-scheme: dark" in drawing
    fills = {}
    for title, *_, fill in bars(drawing):
        if re.match(r"(forward|backward) ", title):
            fills.setdefault(fill, set()).add(re.sub(r" \d.*chunk", "", title.partition(":")[0]))
    assert sorted(map(sorted, fills.values())) == [["backward 0"], ["backward 1"], ["forward 0"], ["forward 1"]]
    texts = [text.text for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    assert {"stage 0", "stage 1", "0 → 1", "1 → 0", "gradient sync", "ms", "0", "3"} <= set(texts)
    assert sum(text.startswith("idle ") for text in texts) == 2


def test_a_stage_idles_while_it_neither_computes_nor_reduces():
    def event(kind, start_s, end_s, stage=0):
        return TimelineEvent(stage=stage, kind=kind, microbatch=None, chunk=None, start_s=start_s, end_s=end_s)

    events = [
        event("forward", 1, 3),
        event("send_forward", 3, 5),
        event("backward", 5, 9),
        event("gradient_sync", 6, 8),
        event("gradient_sync", 8.5, 11),
        event("forward", 3, 4, stage=1),
        event("optimizer", 11, 12),
    ]
    assert idle_s(events, 0, 13) == 1 + 2 + 1
    assert idle_s(events, 1, 13) == 12
