"""Names of results are texts in the report, the summary and the table of searches."""

import csv
import io

import pytest
from hostile_names import NAME, PLAIN, Page, renamed
from sample_results import write_sample_results

import report
from results import read_run, read_search
from summaries import search_table, summary


@pytest.mark.parametrize("kind", ["page", "summary", "table"])
def test_names_are_texts_in_what_is_written_of_results(tmp_path, kind):
    write_sample_results(tmp_path)
    names = {"roomy", "demo", "laptop", "cpu", "block"}
    searches, runs = [read_search(tmp_path, "roomy")], [read_run(tmp_path, "demo")]
    plain, hostile = ((renamed(searches, names, name), renamed(runs, names, name)) for name in (PLAIN, NAME))
    if kind == "page":
        before, after = Page(report.page(*plain)), Page(report.page(*hostile))
        assert after.elements == before.elements and NAME in after.texts
    elif kind == "summary":
        assert summary(*hostile).replace(NAME, PLAIN) == summary(*plain)
    else:
        before, after = (list(csv.reader(io.StringIO(search_table(each[0])))) for each in (plain, hostile))
        assert [len(row) for row in after] == [len(row) for row in before] and after[1][:3] == [NAME, NAME, NAME]
