"""The pages of a grid: Markdown, HTML and picture, with fronts and published times."""

import re
from math import inf

import pandas as pd
from sample_results import a_plan

from grid_html import grid_html
from grid_page import SIZE, draw_grid, front_markdown, published_markdown
from shardwright_formats.display.svg import document, picture, text
from shardwright_formats.io import write_document
from shardwright_search.rent.table import Status, SubClusterRow, csv_of


def _front_row(nodes, status, **numbers):
    unknown = dict.fromkeys(("step_s", "expected_step_s", "simulated_step_s", "usd_per_step", "usd_per_hour"), 0.0)
    rest = {"is_bound": False, "checkpoint_steps": 0, "hours": 0.0, "usd": 0.0, "dominated_by": "", "plan": ""}
    return SubClusterRow(nodes=nodes, status=status, **unknown | rest | numbers)


def test_a_front_is_a_section_with_its_points_and_the_number_of_the_others(tmp_path):
    plan = a_plan()
    write_document(tmp_path / "bert" / "2xa.json", plan)
    point = {"step_s": 2.0, "simulated_step_s": 1.9, "usd_per_step": 0.5, "usd_per_hour": 900.0, "plan": "2xa.json"}
    rows = (
        _front_row("2xa", Status.FRONT, **point),
        _front_row("1xa", Status.DOMINATED, step_s=3.0),
        _front_row("3xa", Status.NO_PLAN),
    )
    (tmp_path / "bert" / "front.csv").write_bytes(csv_of(rows))
    said = front_markdown(tmp_path / "bert" / "front.csv", {}, None)
    assert said.startswith("## Step time against price: bert\n\ndemo on sub-clusters of laptop, batch 32: ")
    assert "1 of 3 are on the front, 1 are dominated, 1 are without a plan." in said
    assert "| 2xa | 2 s | 1.9 s | 16 | 900 | 500 | pp2, 4 microbatch(es), 1f1b |" in said
    assert "1xa |" not in said
    assert "published" not in said.lower()
    beside = front_markdown(tmp_path / "bert" / "front.csv", {"2xa": 2.5, "1xa": 4.0}, "somebody")
    assert "without a plan. Published: stated by somebody." in beside
    assert "| nodes | step, closed form | simulated | published | samples/s |" in beside
    assert "| 2xa | 2 s | 1.9 s | 2.5 s | 16 | 900 | 500 | pp2, 4 microbatch(es), 1f1b |" in beside


def test_the_page_of_a_grid_shows_the_pictures_of_its_fronts(tmp_path):
    write_document(tmp_path / "bert" / "2xa.json", a_plan())
    (tmp_path / "bert" / "front.svg").write_text(document(picture(text(1, 2, "a < b"), 100, 50, "a front")))
    point = {"step_s": 2.0, "simulated_step_s": 1.9, "usd_per_step": 0.5, "usd_per_hour": 900.0, "plan": "2xa.json"}
    (tmp_path / "bert" / "front.csv").write_bytes(csv_of((_front_row("2xa", Status.FRONT, **point),)))
    front = tmp_path / "bert" / "front.csv"
    cells = pd.DataFrame([{**dict.fromkeys(SIZE, "m"), "space": "full", "predicted_step_s": 2.0}])
    sections = ["2 cells.\n", front_markdown(front, {}, None)]
    page = grid_html("g", cells, sections, picture("", 100, 50, "a grid"), [front])
    parts = page.split("<section")
    assert [re.search(r"<h2>(.*?)</h2>", part)[1] for part in parts[1:]] == [
        "Step times beside one another", "Samples a second, by the kinds of parallelism that are allowed",
        "Step time against price: bert",
    ]  # fmt: skip
    assert "a &lt; b" in parts[3] and '<td data-name="plan">pp2, 4 microbatch(es), 1f1b</td>' in parts[3]
    assert '<td class="number" data-name="samples/s">16</td>' in parts[3]


def test_a_space_has_the_same_sign_in_all_grids():
    sizes = {"model": "m", "cluster": "c", "memory_gib": 1.0, "global_batch_size": 8}
    drawn = []
    for spaces in (("full", "dp", "tp"), ("full", "tp")):
        cells = pd.DataFrame([{**sizes, "space": space, "predicted_step_s": 1.0} for space in spaces])
        (sign,) = re.findall(r"<(\w+) [^>]*(fill=\S+)[^>]*><title>tp:", draw_grid(cells))
        drawn.append(sign)
    assert drawn[0] == drawn[1]


def test_published_times_stand_beside_ours():
    sizes = {"model": "m", "cluster": "c", "memory_gib": inf, "global_batch_size": 8}
    steps_s = {"dp": 3.0, "fasop": 2.5, "full": 2.0}
    cells = pd.DataFrame([{**sizes, "space": space, "predicted_step_s": time} for space, time in steps_s.items()])
    cells.loc[cells["space"] == "dp", "predicted_step_s"] = None
    stated = {"model": "m", "cluster": "c", "memory_gib": None, "global_batch_size": 8, "step_s": 3.0, "plan": "pp 2"}
    for space, shown in (("fasop", "2.5 s"), ("dp", "–"), (None, "–")):
        said = published_markdown(cells, [stated | {"space": space}], "somebody")
        assert "as stated by somebody" in said
        assert f"| m | c | all | 8 | pp 2 | 3 s | {shown} | 2 s | 1.50 |" in said
