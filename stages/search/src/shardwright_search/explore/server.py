"""The server of the page: reachable from this machine only, with a token in its URL.

Pages of other sites cannot read from it: they do not know the token, and a host name that they point at this machine is
not accepted in the header `Host`.
"""

import json
import secrets
import subprocess
import sys
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import BytesIO
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from shardwright.command import show
from shardwright.devices.table import read_devices
from shardwright.display.html import html_page
from shardwright.io import BadInput
from shardwright.models.registry import read_presets
from shardwright.types import GIB
from shardwright_search.advise.page import ROWS
from shardwright_search.explore.child import query_of, settings_of
from shardwright_search.options import ExploreOptions
from shardwright_search.systems.registry import SYSTEMS

_HOST = "127.0.0.1"
_MOST_CHILDREN, _MOST_LAUNCHES = 4, 16
_OWN = ("token", "page", "brief", "keep")
"""Parameters that are not settings."""


def explore(options: ExploreOptions) -> None:
    """Print the address of the page, and serve it until Ctrl-C."""
    try:
        server = Explorer(options.port)
    except OSError as error:
        raise BadInput("--port", f"{options.port}: {error.strerror}", "give another, or leave it out") from None
    with server:
        show(server.address("" if options.link is None else query_of(options.link)))
        try:
            server.serve_forever()
        finally:
            server.end_all()


class Explorer(ThreadingHTTPServer):
    """The server, with the searches that run for its pages."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__((_HOST, port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (_HOST, "localhost")}
        self.page, script = explore_page()
        digest = b64encode(sha256(script.encode()).digest()).decode()
        self.policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._children: OrderedDict[str, subprocess.Popen[str]] = OrderedDict()
        self._launches: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._lock = Lock()

    def address(self, query: str = "") -> str:
        """Return the address of the page with its token."""
        return f"http://{_HOST}:{self.server_port}/?token={self.token}{'&' if query else ''}{query}"

    def begin(self, page: str, settings: Mapping[str, str], brief: bool) -> "subprocess.Popen[str]":
        """Start the search of a page in the place of its last one."""
        command = [sys.executable, "-m", "shardwright_search.explore.child"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with self._lock:
            last = self._children.pop(page, None)
            self._children[page] = child
            old = [self._children.popitem(last=False)[1] for _ in range(len(self._children) - _MOST_CHILDREN)]
        for each in (last, *old):
            if each is not None:
                each.kill()
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as given:
            given.write(json.dumps({"settings": settings, "brief": brief}) + "\n")
        return child

    def end(self, page: str, child: "subprocess.Popen[str]") -> None:
        """End a search, and remove it unless another has replaced it."""
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        with self._lock:
            if self._children.get(page) is child:
                del self._children[page]

    def end_all(self) -> None:
        """End all searches."""
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.kill()

    def keep_launch(self, files: dict[str, str]) -> str:
        """Store the files that start a plan, and return their key."""
        key = secrets.token_urlsafe(9)
        with self._lock:
            self._launches[key] = files
            while len(self._launches) > _MOST_LAUNCHES:
                self._launches.popitem(last=False)
        return key

    def launch(self, key: str) -> dict[str, str] | None:
        """Return the files of a key; None if they are no longer stored."""
        with self._lock:
            return self._launches.get(key)


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    server_version, sys_version = "shardwright", ""

    def do_GET(self) -> None:
        """Answer the three requests that the page makes."""
        parts = urlsplit(self.path)
        given = settings_of(parts.query)
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"not for this host")
        elif not compare_digest(given.get("token", "").encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open the address that the command printed")
        elif parts.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.encode())
        elif parts.path == "/search":
            self._search(given)
        elif parts.path == "/launch.zip" and (files := self.server.launch(given.get("key", ""))) is not None:
            self._send(HTTPStatus.OK, "application/zip", zipped(files), 'attachment; filename="launch.zip"')
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page")

    def _send(self, status: HTTPStatus, kind: str, content: bytes, disposition: str | None = None) -> None:
        self._head(status, kind, disposition)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, disposition: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        headers |= {} if disposition is None else {"Content-Disposition": disposition}
        for name, value in headers.items():
            self.send_header(name, value)

    def _search(self, given: dict[str, str]) -> None:
        """Send the events of a search as they occur; end the search when the client disconnects."""
        settings = {name: value for name, value in given.items() if name not in _OWN}
        page = given.get("page", "")[:80]
        child = self.server.begin(page, settings, brief="brief" in given)
        try:
            self._head(HTTPStatus.OK, "text/event-stream")
            self.end_headers()
            for event in self._events(child):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self.server.end(page, child)

    def _events(self, child: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
        """Yield the events of a search, with files replaced by their key, and always an end."""
        assert child.stdout is not None
        kind = ""
        for line in child.stdout:
            event = json.loads(line)
            kind = event["kind"]
            if kind == "launch":
                files = event.pop("files")
                event["key"] = self.server.keep_launch(files) if files else ""
            yield event
        if kind != "end":
            if child.wait() > 0:
                yield {"kind": "error", "words": "the search failed: the terminal shows the reason"}
            yield {"kind": "end"}

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log: the URL contains the token."""


def zipped(files: Mapping[str, str]) -> bytes:
    """Return files as a zip archive, scripts executable."""
    content = BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = ZipInfo(f"launch/{name}")
            entry.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            entry.compress_type = ZIP_DEFLATED
            archive.writestr(entry, text)
    return content.getvalue()


# The page of `explore`: its form, and placeholders for results.


_TITLE = "Shardwright: explore plans"
_FIRST = "Choose a model and GPUs: each change is searched at once. All figures are estimates; nothing is measured."
_MODEL = '<input id="model" list="models" spellcheck="false" placeholder="a preset or a config.json">'
_BUDGETS = "Each point is the best plan for a budget of memory. Hollow points are of searches that were stopped."
_PRICES = "Each point is the best plan on a quarter to four times as many GPUs. The ring is at those that are chosen."
_SECTIONS = (
    ("The plan", "plan", ROWS),
    ("Memory of a GPU, by category", "memory", ""),
    ("Memory against time", "memory_front", _BUDGETS),
    ("Price against time", "price_front", _PRICES),
)


def explore_page() -> tuple[str, str]:
    """Return the page and its script."""
    script = files("shardwright_search.explore").joinpath("explore.js").read_text(encoding="utf-8")
    sections = "".join(
        f"<section data-found hidden><h2>{title}</h2>{f'<p class=soft>{words}</p>' if words else ''}"
        f'<div id="{name}" tabindex="-1"></div></section>'
        for title, name, words in _SECTIONS
    )
    body = (
        "<noscript><p>This page needs JavaScript.</p></noscript>"
        f'{_form()}<p id="status" role="status" aria-live="polite"></p>'
        '<div id="found" data-found hidden><p class="first" id="sentence"></p><div id="answer"></div>'
        '<p class="buttons"><button type="button" id="keep">Keep beside others</button>'
        '<a class="button" id="launch" hidden>Download what starts it</a></p><ul id="notes"></ul></div>'
        '<section id="kept" hidden><h2>Side by side</h2><div class="cards" id="cards"></div></section>'
        f"{sections}"
    )
    return html_page(_TITLE, escape(_FIRST), body, script), script


def _form() -> str:
    models = "".join(f'<option value="{escape(name)}"></option>' for name in read_presets())
    titles = {"": "this runtime"} | {str(name): entry.title for name, entry in SYSTEMS.items()}
    systems = "".join(f'<option value="{name}">{escape(title)}</option>' for name, title in titles.items())
    return (
        f'<datalist id="models">{models}</datalist><form class="fields" id="form" autocomplete="off">'
        f"{_field('Model', _MODEL)}"
        f"{_nodes('', 'GPUs')}{_nodes('-2', 'and')}"
        f"{_number('batch', 'Samples of a step', 'usual')}{_number('seq', 'Tokens of a sample', 'the model’s')}"
        f"{_field('System', f'<select id=for>{systems}</select>')}"
        f"{_number('budget_gib', 'GiB of a GPU that a plan may use', '92 %', 'any')}</form>"
    )


def _nodes(number: str, name: str) -> str:
    """Return the form fields for the nodes of one type."""
    devices = {key: each.memory_bytes for key, each in read_devices().devices.items() if each.memory_bytes}
    listed = "".join(
        f'<option value="{escape(key)}">{escape(key)}, {size / GIB:.0f} GiB</option>' for key, size in devices.items()
    )
    empty = "choose a device" if not number else "no other type"
    return (
        f"<fieldset><legend>{name}</legend>"
        f'<input id="nodes{number}" aria-label="nodes" type="number" min="1" value="1">'
        f'<span>nodes of</span><input id="each{number}" aria-label="GPUs of a node" type="number" min="1" value="8">'
        f'<select id="device{number}" aria-label="device"><option value="">{empty}</option>{listed}</select></fieldset>'
    )


def _number(name: str, words: str, default: str, step: str = "1") -> str:
    return _field(words, f'<input id="{name}" type="number" min="0" step="{step}" placeholder="{escape(default)}">')


def _field(words: str, control: str) -> str:
    return f"<label><span>{escape(words)}</span>{control}</label>"
