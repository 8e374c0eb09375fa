"""Settings of Sphinx for the site that `make docs` builds from the pages of the repository, without the network.

    sphinx-build --fail-on-warning --keep-going -c docs/site . build/docs

The source folder is the repository itself, so a link means the same on the site and on a code host. Sphinx refuses
links to pages and headings that do not exist; check_links.py then checks the pages that were written.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]

project = "Shardwright"
release = version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
html_title = f"Shardwright {release}"
html_short_title = "Shardwright"

extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["*.md", "config/*.md", "docs/*.md", "docs/design/*.md", "benchmarks/results/*.md"]
# Headings up to this level are targets of links, by the names that GitHub gives them.
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "alabaster"
html_theme_options = {"page_width": "72rem", "fixed_sidebar": True, "show_powered_by": False}
html_static_path = ["_static"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_copyright = False

_FURTHER = ("../README", "../config/README", "../CONTRIBUTING", "../CHANGELOG")
_TREE = "\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n{pages}\n```\n"


def _linked_pages(text: str) -> list[str]:
    """Return the pages that a page links, in order and once each, as a table of contents names them."""
    return list(dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.md[)#]", text)))


def complete_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the contents to the pages that list others, and put a title above a table that a benchmark wrote."""
    results = ROOT / "benchmarks" / "results"
    trees = {
        root_doc: [*_FURTHER, *_linked_pages(source[0])],
        "docs/design/README": _linked_pages(source[0]),
        "docs/status": [f"../benchmarks/results/{path.stem}" for path in sorted(results.glob("*.md"))],
    }
    if page.startswith("benchmarks/results/") and not source[0].startswith("# "):
        source[0] = f"# Results: {Path(page).name}\n\n{source[0]}"
    if page in trees:
        source[0] += _TREE.format(pages="\n".join(trees[page]))


def setup(app: Sphinx) -> None:
    """Let Sphinx call what completes a page."""
    app.connect("source-read", complete_page)
