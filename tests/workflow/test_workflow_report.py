"""The report, the summary and the grid, over made-up results."""

import base64
import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from sample_results import a_plan, write_sample_results

import report
from report import draw_loss, draw_step_times
from results import evaluation_text, read_picture, read_profile, read_run, read_search
from shardwright.display.plan_words import layers_summary
from shardwright.display.svg import bar, document, picture
from shardwright.io import BadInput
from shardwright.types import Cluster, NodeGroup, NodeType, Recompute
from summaries import numbers, search_table, summary

SVG = "{http://www.w3.org/2000/svg}"
MIB = 1024 * 1024


@pytest.fixture
def results(tmp_path):
    write_sample_results(tmp_path)
    return tmp_path


def _cells(page, number):
    """The cells of one of the tables below the overview, row by row."""
    body = page.partition("<h2>Details</h2>")[2].split("<tbody>")[number + 1].partition("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", body)]


def test_the_page_stands_alone_and_is_well_formed(results):
    page = report.page([read_search(results, "roomy")], [read_run(results, "demo")])
    assert not re.search(r"""src\s*=|href\s*=(?!"#)|@import|url\((?!#)|<script""", page)
    assert page.count("<svg") == page.count("</svg>") == 10
    opened = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta",):
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

        def handle_startendtag(self, tag, attributes):
            pass

    Balance().feed(page)
    assert opened == []


def test_the_page_tells_predicted_from_measured(results):
    page = report.page([read_search(results, "roomy")], [])
    cells = _cells(page, 0)
    assert [(row[0], *row[2:6]) for row in cells] == [
        ("chosen", "200 ms", "210 ms", "1.05", "1.02"),
        ("runner-up 1", "220 ms", "250 ms", "1.14", "1.10"),
        ("runner-up 2", "250 ms", "–", "–", "–"),
    ]
    assert cells[0][6:] == ["57 MiB", "60 MiB", "1.05"]


def test_every_rank_that_was_measured_is_held_against_its_pipeline_stage(results):
    cells = _cells(report.page([read_search(results, "roomy")], []), 1)
    assert [row[0] for row in cells] == ["chosen"] * 8 + ["runner-up 1"] * 8
    assert [(row[1], row[2]) for row in cells[:8]] == [(str(rank), str(rank // 4)) for rank in range(8)]
    assert cells[3][3:] == ["200 ms", "210 ms", "1.05", "1.02", "57 MiB", "60 MiB", "1.05"]
    # The second pipeline stage is predicted to hold fewer activations in flight.
    assert cells[4][3:] == ["200 ms", "210 ms", "1.05", "1.02", "49 MiB", "60 MiB", "1.22"]


def test_a_machine_that_has_changed_is_told_and_ratios_are_also_at_equal_speed(results):
    """The reference workload took 12 ms when the machine was profiled, 15 ms beside the plans: 1.25 times as long."""
    usual = report.page([read_search(results, "roomy")], [])
    assert "has changed" not in usual and "has changed" not in summary([read_search(results, "roomy")], [])
    path = results / "plans" / "roomy.prediction.json"
    path.write_text(path.read_text().replace('"reference_s": 0.0145', '"reference_s": 0.012'))
    search = read_search(results, "roomy")
    page = report.page([search], [])
    assert [row[4:6] for row in _cells(page, 0)] == [["1.05", "0.84"], ["1.14", "0.91"], ["–", "–"]]
    told = (
        "machine has changed since it was profiled: while these plans were measured its reference workload took 1.25 "
        "times as long"
    )
    assert f"<strong>The {told}" in page and told in summary([search], [])


def test_the_page_begins_with_what_was_predicted_beside_what_was_measured(results):
    write_sample_results(results, search="tight", budget_mib=50)
    page = report.page([read_search(results, name) for name in ("roomy", "tight")], [])
    (overview,) = page.partition("<h2>Details</h2>")[0].split("<tbody>")[1:]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", overview)]
    assert [row[0] for row in rows] == ["roomy", "tight"] and len(rows[0]) == 9
    assert rows[0][2:] == ["200 ms", "210 ms", "1.05", "1.02", "57 MiB", "60 MiB", "1.05"]


def test_what_was_learned_is_shown_with_its_evidence(results):
    page = report.page([read_search(results, "roomy")], [])
    assert _cells(page, 2) == [
        ["forward", "1.250", "0.750 to 1.500", "2", "16"],
        ["step end", "3.000", "3.000 to 3.000", "1", "8"],
    ]
    assert "<li>forward: thin: 2 plan(s) &lt;of&gt; many</li>" in page


def test_what_other_plans_taught_is_not_shown(results):
    path = results / "corrections" / "roomy.json"
    path.write_text(path.read_text().replace(read_search(results, "roomy").plan.sha256, "f" * 64))
    assert read_search(results, "roomy").correction is None
    assert "What was learned" not in report.page([read_search(results, "roomy")], [])


def test_each_cell_of_a_table_carries_the_name_of_its_column(results):
    """A narrow page shows a row's cells one below another, where the table's head is out of sight."""
    page = report.page([read_search(results, "roomy")], [])
    for table in re.findall(r"<table>.*?</table>", page):
        names = re.findall(r'<th(?: class="number")?>(.*?)</th>', table)
        for row in re.findall(r'<tr(?: class="chosen")?>(<td.*?)</tr>', table):
            assert re.findall(r'data-name="(.*?)"', row) == names and len(set(names)) == len(names)


def test_the_table_of_contents_leads_to_every_part(results):
    page = report.page([read_search(results, "roomy")], [read_run(results, "demo")])
    assert re.findall(r'href="#(.*?)">(.*?)<', page) == [("part-1", "Plan: roomy"), ("part-2", "Run: demo")]
    assert re.findall(r'id="(part-.)"><h2>(.*?)<', page) == [("part-1", "Plan: roomy"), ("part-2", "Run: demo")]


def test_no_picture_and_no_table_is_wider_than_the_page(results):
    """Pictures scale by their viewBox, tables scroll in a box of their own, so that 420 pixels are enough."""
    page = report.page([read_search(results, "roomy")], [read_run(results, "demo")])
    wide = re.findall(r'<label class="wide"><input [^>]*/><svg [^>]*viewBox="0 0 (\d+) [^>]*>', page)
    narrow = re.findall(r'<div class="narrow"><svg [^>]*viewBox="0 0 (\d+) [^>]*>', page)
    assert {*wide} == {"1020"} and {*narrow} == {"360"}
    assert page.count("<svg") == len(wide) + len(narrow) == 2 * len(wide)
    assert page.count("<table>") == page.count('<div class="wide"><table>') > 0
    css = page.partition("<style>")[2].partition("</style>")[0]
    scaled = "label.wide > svg, label.wide > img { display: block; width: 100%; max-width: 100%; height: auto; }"
    assert scaled in css and "min-width: 660px" not in css


def test_the_numbers_beside_the_page_are_those_of_the_page(results):
    said = json.loads(numbers([read_search(results, "roomy")], [read_run(results, "demo")]))
    plans = said["searches"]["roomy"]["plans"]
    assert list(plans) == ["chosen", "runner-up 1", "runner-up 2"]
    chosen = plans["chosen"]
    assert (chosen["predicted"]["simulated_step_time_s"], chosen["measured_step_time_s"]) == (0.2, 0.21)
    assert (chosen["measured_memory_bytes"], chosen["fits_by_bytes"]) == (60 * MIB, 4 * MIB)
    assert plans["runner-up 2"]["measured"] is None
    assert len(said["runs"]["demo"]["steps"]) == 100


def test_a_picture_that_is_given_is_shown_with_its_hover_text(results):
    path = results / "laptop.svg"
    path.write_text(document(picture(bar(1, 2, 3, 4, "tp: 1.2 times as long"), 100, 50, "a grid")))
    given = read_picture(path)
    page = report.page([], [], [], [given])
    assert "<h2>Picture: laptop</h2>" in page and "<title>tp: 1.2 times as long</title></rect>" in page
    root = ElementTree.fromstring(given.drawing)
    assert (root.get("width"), root.get("height")) == ("100%", None) and root.get("viewBox")


@pytest.mark.parametrize(
    "content",
    [
        "<svg", "<p/>", '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><script/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect onclick="x"/></svg>',
        '<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>',
    ],
)  # fmt: skip
def test_a_picture_that_could_do_more_than_be_looked_at_is_refused(tmp_path, content):
    (tmp_path / "odd.svg").write_text(content)
    with pytest.raises(BadInput, match=r"odd\.svg: is no"):
        read_picture(tmp_path / "odd.svg")


def test_text_from_files_cannot_become_markup(results):
    page = report.page([read_search(results, "roomy")], [])
    assert "&lt;beyond&gt;" in page
    assert "<beyond>" not in page


def test_numbers_that_nobody_measured_are_marked_where_they_stand(results):
    before = read_search(results, "roomy")
    assert "<strong>" not in report.page([before], []) and "predicted step<" in report.page([before], [])
    seen = "analytic: forward_s of m.h5: nothing was measured: median error 19 %"
    prediction = msgspec.structs.replace(
        before.prediction, warnings=(seen, "analytic: messages of h.h5", "absent: optimizer_s: counted as <0>")
    )
    page = report.page([before._replace(prediction=prediction)], [])
    assert "<p><strong>analytic</strong>: forward_s of m.h5: nothing was measured: median error 19 %</p>" in page
    assert "<p><strong>absent</strong>: optimizer_s: counted as &lt;0&gt;</p>" in page
    assert page.count("predicted step, analytic, absent") == 1
    alone = before._replace(prediction=prediction, comparisons=(before.comparisons[0]._replace(measured=None),))
    said = report.page([alone], [])
    assert "it was not run; not all was measured that it is predicted from: analytic, absent; 3 warnings" in said


def test_the_same_results_give_the_same_page(results):
    outcomes = [read_search(results, "roomy")], [read_run(results, "demo")]
    assert report.page(*outcomes) == report.page(*outcomes)


def test_the_loss_curve_falls_when_the_loss_falls(results):
    line = ElementTree.fromstring(draw_loss(read_run(results, "demo"))).find(f"{SVG}polyline").get("points").split()
    heights = [float(point.partition(",")[2]) for point in line]
    assert len(heights) == 100
    assert heights[-1] > heights[0]


def test_a_prediction_of_another_plan_is_refused(results):
    write_sample_results(results / "other", search="roomy2")
    (results / "other" / "plans" / "roomy2.json").rename(results / "plans" / "roomy.json")
    with pytest.raises(BadInput, match=r"roomy\.prediction\.json: is for another plan"):
        read_search(results, "roomy")


def test_a_torn_line_of_metrics_is_refused_with_its_number(results):
    path = results / "runs" / "demo" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step":7,', '"step":'))
    with pytest.raises(BadInput, match=r"metrics\.jsonl: line 7"):
        read_run(results, "demo")


def test_evaluations_and_the_predicted_step_time_are_drawn_beside_what_was_measured(results):
    run = read_run(results, "demo")
    titles = [title.text for title in ElementTree.fromstring(draw_loss(run)).iter(f"{SVG}title")]
    found = [title for title in titles if title and title.startswith("validation loss")]
    assert found == [f"validation loss after step {n}: {run.steps[n - 1].evaluation.loss:.3f}" for n in (50, 100)]
    assert "predicted" in draw_step_times(run)
    unpredicted = run._replace(result=msgspec.structs.replace(run.result, predicted_step_time_s=None))
    assert "predicted" not in draw_step_times(unpredicted)
    assert evaluation_text(run).startswith("Validation loss 1.9522 (perplexity 7.04") and "step 100: c." in report.page(
        [], [run]
    )


def test_the_summary_names_plan_ratio_and_losses(results):
    said = summary([read_search(results, "roomy")], [read_run(results, "demo")])
    assert "plan roomy within 64 MiB a device: pp2, 4 microbatch(es), 1f1b" in said
    assert re.search(r"chosen +200 ms +210 ms +1\.05", said)
    assert "run demo: 100 steps, loss 7.600 -> 1.702 (-78%)" in said


def test_the_grid_has_a_row_per_search(results):
    (row,) = csv.DictReader(io.StringIO(search_table([read_search(results, "roomy")])))
    assert (row["search"], row["predicted_step_time_s"], row["pp_size"]) == ("roomy", "0.2", "2")
    assert row["memory_budget_bytes"] == str(64 * MIB)


def test_equal_neighbours_are_counted_together():
    assert layers_summary(a_plan()) == (
        "3 tp1 x dp4 zero3 recompute full + 1 tp1 x dp4 ddp | 2 tp1 x dp4 ddp + 2 tp2 x dp2 zero2 megatron"
    )
    alike = msgspec.structs.replace(a_plan(), layers=a_plan().layers[4:5] * 8)
    assert layers_summary(alike) == "2 stages of 4 tp1 x dp4 ddp"
    recomputed = msgspec.structs.replace(a_plan().layers[4], recompute=Recompute.FULL)
    half = msgspec.structs.replace(a_plan(), layers=(recomputed,) * 3 + a_plan().layers[4:5] * 5)
    assert layers_summary(half) == "all tp1 x dp4 ddp; 3 recompute full + 1 as is | 4 as is"


def test_a_profile_is_told_with_its_sources_and_how_well_curves_explain_it(tmp_path):
    example = Path(__file__).parents[2] / "core" / "examples" / "model_profile.h5"
    for name, content in (("profiles/demo@cpu.h5", example.read_bytes()), ("pictures/demo@cpu.svg", b"<svg>&</svg>")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    page = report.page([], [], [read_profile(tmp_path, "demo@cpu")])
    assert "<h2>Profile: demo@cpu</h2>" in page
    assert "3 points, absent, measured; 2026-01-31, torch 2.13.0" in page
    assert "<li>Made up.</li>" in page
    assert ["forward", "line in the micro-batch size", "1", "1.0%", "2.0%", "3.0%"] in _cells(page, 0)
    assert f'src="data:image/svg+xml;base64,{base64.b64encode(b"<svg>&</svg>").decode()}"' in page


def test_of_several_node_types_it_is_told_which_binds_and_what_idle_ranks_cost(results):
    search = read_search(results, "roomy")
    node = NodeType(device="cpu", devices_per_node=4, memory_bytes=1 << 30, usd_per_hour=2.0)
    slow = msgspec.structs.replace(node, device="cpu/2", usd_per_hour=None)
    groups = (NodeGroup(node_type="fast", count=1), NodeGroup(node_type="slow", count=1))
    mixed = Cluster(name="mixed", nodes=groups, node_types={"fast": node, "slow": slow})
    chosen = search.comparisons[0]
    own = chosen._replace(plan=msgspec.structs.replace(chosen.plan, cluster=mixed))
    of = search._replace(comparisons=(own, *search.comparisons[1:]))
    said = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report.page([of], [])))["Node types"]
    fast, last = json.loads(numbers([of], []))["searches"]["roomy"]["plans"]["chosen"]["node_types"]
    assert (fast["name"], fast["ranks"], fast["stages"], last["idle_usd"]) == ("fast", 4, 1, None)
    end_s = max(event.end_s for event in own.estimate.timeline)
    assert fast["idle_usd"] == pytest.approx(fast["idle_share"] * 2.0 / 3600 * end_s)
    assert said.count("(binds)") == 1 and f"idle {last['idle_share']:.1%}" in said
    assert f"which costs ${1000 * fast['idle_usd']:.3g} in a thousand steps" in said.partition("slow")[0]
