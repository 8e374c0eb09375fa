"""The page of a grid, with fronts and published times."""

import re
from math import inf

import pandas as pd
from hostile_names import NAME, PLAIN, renamed
from sample_results import a_plan

from grid_tables import front_section, grid_section, published_section
from shardwright.io import write_document
from shardwright_search.rent.table import Status, SubClusterRow, csv_of

SPACES = ("full", "tp")


def _front_row(nodes, status, **numbers):
    unknown = dict.fromkeys(("step_s", "simulated_step_s", "usd_per_step", "usd_per_hour"), 0.0)
    rest = {"is_bound": False, "hours": 0.0, "usd": 0.0, "dominated_by": "", "plan": ""}
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
    said = front_section(tmp_path / "bert" / "front.csv", {}, None).markdown
    assert said.startswith("## Step time against price: bert\n\ndemo on sub-clusters of laptop, batch 32: ")
    assert "1 of 3 are on the front, 1 are dominated, 1 are without a plan." in said
    assert "| 2xa | pp2, 4 microbatch(es), 1f1b | 2 s | 1.9 s | 16 | 900 | 500 |" in said
    assert "1xa |" not in said
    assert "published" not in said.lower()
    beside = front_section(tmp_path / "bert" / "front.csv", {"2xa": 2.5, "1xa": 4.0}, "somebody").markdown
    assert "without a plan. Published: stated by somebody." in beside
    assert "| nodes | plan | step, closed form | simulated | published | samples/s |" in beside
    assert "| 2xa | pp2, 4 microbatch(es), 1f1b | 2 s | 1.9 s | 2.5 s | 16 | 900 | 500 |" in beside


def test_published_times_stand_beside_ours():
    sizes = {"model": "m", "cluster": "c", "memory_gib": inf, "global_batch_size": 8}
    steps_s = {"dp": 3.0, "fasop": 2.5, "full": 2.0}
    cells = pd.DataFrame([{**sizes, "space": space, "predicted_step_s": time} for space, time in steps_s.items()])
    cells.loc[cells["space"] == "dp", "predicted_step_s"] = None
    stated = {"model": "m", "cluster": "c", "memory_gib": None, "global_batch_size": 8, "step_s": 3.0, "plan": "pp 2"}
    for space, shown in (("fasop", "2.5 s"), ("dp", "–"), (None, "–")):
        said = published_section(cells, [stated | {"space": space}], "somebody").markdown
        assert "as stated by somebody" in said
        assert f"| m | c | pp 2 | all | 8 | 3 s | {shown} | 2 s | 1.50 |" in said


def test_names_are_texts_in_the_pages_of_a_grid(tmp_path):
    sizes = {"cluster": "c", "memory_gib": 1.0, "global_batch_size": 8}
    point = {"step_s": 2.0, "simulated_step_s": 1.9, "usd_per_step": 0.5, "usd_per_hour": 900.0, "plan": "2xa.json"}

    def written(name):
        cells = pd.DataFrame([{**sizes, "model": name, "space": space, "predicted_step_s": 1.0} for space in SPACES])
        stated = {**sizes, "model": name, "space": "tp", "step_s": 3.0, "plan": name}
        write_document(tmp_path / "2xa.json", renamed(a_plan(), {"demo", "laptop", "roomy"}, name))
        (tmp_path / "front.csv").write_bytes(csv_of((_front_row(name, Status.FRONT, **point),)))
        front = front_section(tmp_path / "front.csv", {name: 2.0}, name)
        absent = dict.fromkeys(
            ("measured_step_s", "published_step_s", "published_memory_bytes", "reason"), float("nan")
        )
        sections = [grid_section(cells.assign(**absent)), published_section(cells, [stated], name), front]
        return "\n".join(section.markdown for section in sections)

    plain, hostile = written(PLAIN), written(NAME)
    lines, plain_lines = hostile.splitlines(), plain.splitlines()
    assert len(lines) == len(plain_lines)
    for line, other in zip(lines, plain_lines, strict=True):
        # A sign behind a backslash is a text; none but these may be left.
        assert re.sub(r"\\.", "", line).count("|") == other.count("|")
        assert not re.search(r"[<>`\[\]*&]", re.sub(r"\\.", "", line))
