"""The site of the documentation: what `make docs` refuses."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs" / "site"
PAGES = [path for pattern in ("*.md", "config/*.md", "docs/**/*.md") for path in sorted(ROOT.glob(pattern))]
_spec = importlib.util.spec_from_file_location("check_links", SETTINGS / "check_links.py")
links = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(links)


def _heading_names(page):
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#{1,4} +(.+)$", text, re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in shown}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page):
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        linked = page.parent / target if target else page
        if linked.suffix == ".md":
            assert anchor in _heading_names(linked), f"{page.name}: {target}#{anchor}"


def _built(folder, sentence):
    """Exit code of the site's build from a small repository whose page says a sentence."""
    shutil.copytree(SETTINGS, folder / "docs/site")
    (folder / "VERSION").write_text("1.0\n")
    (folder / "config").mkdir()
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "config/README.md"):
        (folder / page).write_text("# Title\n")
    (folder / "docs/README.md").write_text("# Pages\n\n[plans](plan.md#two-plans)\n")
    (folder / "docs/plan.md").write_text(f"# Plans\n\n## Two plans\n\n{sentence}\n")
    built = folder / "build"
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", str(folder / "docs/site")]
    return build_main([*options, str(folder), str(built)]) or len(list(links.broken_links(built)))


@pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
@pytest.mark.parametrize(
    ("sentence", "is_refused"),
    [
        ("[there](README.md), [here](#two-plans), [the version](../VERSION)", False),
        ("[no page](plans.md)", True),
        ("[no heading](README.md#plans)", True),
        ("[no heading here](#three-plans)", True),
        ("![no picture](plan.svg)", True),
    ],
)
def test_a_site_with_a_broken_link_is_refused(tmp_path, sentence, is_refused):
    assert bool(_built(tmp_path, sentence)) is is_refused


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="b.html#x">b</a><a href="https://a.org/">a</a>', None),
        ('<a href="c.html">c</a>', "no such file"),
        ('<a href="b.html#y">b</a>', "no such heading"),
        ('<a href="#x">x</a>', "no such heading"),
        ('<img src="a.png">', "no such file"),
        ('<script src="https://a.org/a.js"></script>', "loaded from elsewhere"),
        ('<link rel="stylesheet" href="//a.org/a.css">', "loaded from elsewhere"),
    ],
)
def test_a_written_page_with_a_broken_link_is_named(tmp_path, html, fault):
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<p id="x">here</p>')
    lines = list(links.broken_links(tmp_path))
    assert len(lines) == (fault is not None)
    assert all(line.startswith("a.html: ") and fault in line for line in lines)
