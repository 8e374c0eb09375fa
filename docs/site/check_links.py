"""Whether every link of a built site leads to a file and an anchor of the site, and nothing is loaded from elsewhere.

    python docs/site/check_links.py build/docs

Links to other sites are not followed: the check needs no network.
"""

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class Page(NamedTuple):
    """The anchors of a page, what it links, and what a browser loads with it."""

    anchors: frozenset[str]
    links: tuple[str, ...]
    loaded: tuple[str, ...]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if href := values.get("href"):
            (self.loaded if tag == "link" else self.links).append(href)
        if src := values.get("src"):
            self.loaded.append(src)


@cache
def read_page(path: Path) -> Page:
    """Return the anchors and links of an HTML file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return Page(frozenset(reader.anchors), tuple(reader.links), tuple(reader.loaded))


def broken_links(site: Path) -> Iterator[str]:
    """Yield one line for each broken link of a site, and for each file that a page loads from elsewhere."""
    for path in sorted(site.rglob("*.html")):
        page, name = read_page(path), path.relative_to(site)
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{name}: {link}: loaded from elsewhere: keep it in the site"
        for link in dict.fromkeys((*page.links, *page.loaded)):
            if fault := _fault(path, link):
                yield f"{name}: {link}: {fault}"


def _fault(path: Path, link: str) -> str | None:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "there is no such file: correct the link"
    is_page = target.suffix == ".html"
    if is_page and parts.fragment and unquote(parts.fragment) not in read_page(target).anchors:
        return "there is no such heading: correct the part behind #"
    return None


def main() -> None:
    """Print each broken link; exit code 2 where there is one."""
    site = Path(sys.argv[1])
    faults = list(broken_links(site))
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages in {site}: {len(faults) or 'no'} broken links")
    sys.exit(2 if faults or not pages else 0)


if __name__ == "__main__":
    main()
