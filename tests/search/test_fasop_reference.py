"""FASOP's own tables: repeated by its formulas written anew, and never better than exact partitions of its space."""

import subprocess
import sys
from pathlib import Path

import fasop_compare
import pytest
from fasop_estimate import estimate_of, estimates
from fasop_inputs import CASES
from fasop_problem import candidates
from fasop_published import DEFECTS, published

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "../shared/reference/fasop"


@pytest.fixture
def table_of():
    if not REFERENCE.is_dir():
        pytest.skip("FASOP's tables are not here")
    return lambda name: fasop_compare.read_table(REFERENCE, next(c for c in CASES if c.table == f"head_rerun_{name}"))


def test_without_the_tables_the_benchmark_says_so_in_one_line(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks/fasop.py"),
        "--reference",
        "nowhere",
        "--out",
        str(tmp_path / "p"),
    ]
    called = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert called.returncode == 2 and called.stdout == "" and not (tmp_path / "p").exists()
    assert called.stderr.count("\n") == 1 and called.stderr.startswith("error: "), called.stderr


@pytest.mark.parametrize(("name", "other_layers"), [("bert", 6), ("bert_het", 36), ("gpt2", 0)])
def test_a_table_is_repeated_to_the_digit(table_of, name, other_layers):
    """Memory is printed with four digits, times in single precision."""
    table = table_of(name)
    found = fasop_compare.repeated_of(table)
    assert found.difference < 1e-4 and found.flags == 0
    assert (found.partitions, found.other_layers) == (len(table.rows), other_layers)


@pytest.mark.parametrize("name", ["bert", "bert_het", "gpt2", "gpt2_het", "T5", "T5_het", "gpt2XL_pareto_n4"])
def test_candidates_are_the_same_and_the_fastest_is_no_slower(table_of, name):
    table = table_of(name)
    every = [own for counts in table.case.counts for own in candidates(table.problem, counts)]
    assert sorted(every) == sorted(row.own for row in table.rows)
    tops = fasop_compare.tops_of(table, estimates(table.problem, every))
    assert tops.ours_s <= tops.theirs_s


def test_four_rows_of_t5_are_faster_with_its_partition_by_their_all_reduce_at_the_end(table_of):
    table = table_of("T5")
    theirs = {row.own: row.layers for row in table.rows}
    before = estimates(table.problem, theirs)
    of = {own: estimate_of(table.problem, own, layers).step_s for own, layers in theirs.items()}
    slower = [own for own in before if own.step_s > of[own.candidate] * (1 + 1e-9)]
    assert len(slower) == 4
    assert all(
        own.pipeline_s <= estimate_of(table.problem, own.candidate, theirs[own.candidate]).pipeline_s for own in slower
    )


def test_partitions_of_mixed_bert_miss_the_least_bottleneck_in_89_of_284_in_its_own_measure(table_of):
    found = fasop_compare.partitions_of(table_of("bert_het"))
    assert (found.rows, len(found.missed), len(found.slower)) == (284, 88, 0)
    assert max(found.missed) == pytest.approx(0.472, abs=1e-3) and min(found.missed) > 0
    assert len(found.missed_own) == 89 and max(found.missed_own) == pytest.approx(0.468, abs=5e-4)


def test_mended_the_published_formula_is_the_estimates(table_of):
    """Of the same partition: the same answer whether it fits, the same tied all-reduce, reduction no longer."""
    table = table_of("bert_het")
    for row in table.rows:
        mine = estimate_of(table.problem, row.own, row.layers)
        theirs = published(table.problem, row.own, row.layers, DEFECTS)
        assert (mine.memory.is_oom, mine.memory.is_sharded_oom) == (theirs.is_oom, theirs.is_sharded_oom), row.own
        assert mine.tied_s == pytest.approx(theirs.tied_s) and theirs.reduction_s <= mine.reduction_s * (1 + 1e-9)
        if row.own.pp_size == 1:
            assert mine.step_s == pytest.approx(theirs.step_s, rel=1e-9)
