"""`explore`: who is let in, what a search tells, and that a new one ends the last."""

import io
import json
import re
from base64 import b64encode
from hashlib import sha256
from http.client import HTTPConnection
from threading import Thread
from urllib.parse import urlencode
from zipfile import ZipFile

import pytest

from shardwright.io import BadInput
from shardwright.types import Plan
from shardwright_search.explore.child import asked_of, query_of
from shardwright_search.explore.server import Explorer


@pytest.fixture
def server():
    with Explorer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.end_all()
        server.shutdown()


def asked(server, path, host=None, **given):
    """A request as a browser sends it, and its answer: status, headers and content."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.request("GET", f"{path}?{urlencode(given)}", headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


def test_only_the_address_with_the_token_on_this_machine_is_answered(server):
    right = {"token": server.token}
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/search", "/launch.zip"):
        assert asked(server, path)[0] == asked(server, path, token="x" * 32)[0] == 403
        assert asked(server, path, host=f"evil.example:{server.server_port}", **right)[0] == 403
        assert asked(server, path, host="127.0.0.1", **right)[0] == 403
    assert asked(server, "/../pyproject.toml", **right)[0] == asked(server, "/launch.zip", key="x", **right)[0] == 404
    status, headers, content = asked(server, "/", host=f"localhost:{server.server_port}", **right)
    assert status == 200 and headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    script = re.search(r"<script>(.*?)</script>", content.decode(), re.DOTALL)[1]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"] and server.token.encode() not in content


def events_of(content):
    return [json.loads(line.removeprefix("data: ")) for line in content.decode().split("\n\n") if line]


def test_a_search_tells_the_answer_its_files_and_other_sizes(server, config):
    given = {"token": server.token, "page": "p", "model": config, "gpus": "1x2:A100-80", "batch": 16, "seq": 256}
    status, headers, content = asked(server, "/search", **given)
    events = events_of(content)
    kinds = [event["kind"] for event in events]
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    assert kinds[-1] == "end" and kinds.index("answer") < kinds.index("launch") < kinds.index("memory_front")
    assert "price_front" in kinds and "error" not in kinds
    answer = next(event for event in events if event["kind"] == "answer")
    assert "<svg" in answer["plan"] and "<svg" in answer["memory"] and dict(answer["row"])["GPUs"] == "1x2:A100-80"
    assert not answer["so_far"]
    key = next(event["key"] for event in events if event["kind"] == "launch")
    status, headers, content = asked(server, "/launch.zip", token=server.token, key=key)
    assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="launch.zip"')
    with ZipFile(io.BytesIO(content)) as archive:
        plan = json.loads(archive.read("launch/plan.json"))
        assert archive.getinfo("launch/node.sh").external_attr >> 16 == 0o100755
    assert plan["format"] == Plan.FORMAT and plan["global_batch_size"] == 16
    brief = events_of(asked(server, "/search", **given, brief=1)[2])
    assert [event for event in brief if event["kind"] != "progress"] == [answer, {"kind": "end"}]


def test_a_new_search_of_a_page_ends_its_last_one(server, config):
    first = server.begin("p", {"model": "llama-3.1-405b", "gpus": "512x8:H100-SXM"}, brief=False)
    other = server.begin("q", {"model": str(config), "gpus": "1x1:A100-80"}, brief=True)
    second = server.begin("p", {"model": str(config), "gpus": "1x1:A100-80"}, brief=True)
    assert first.wait(10) < 0 and other.poll() is None
    server.end("p", first)
    assert server._children["p"] is second
    for page, child in (("p", second), ("q", other)):
        server.end(page, child)
    assert not server._children


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "model: is not given"),
        ({"model": "gpt2-xl"}, "gpus: is not given"),
        ({"model": "gpt2-xl", "gpus": "8:L4", "batch": "x"}, "batch: Expected `int"),
        ({"model": "gpt2-xl", "gpus": "8:L4", "for": "x"}, "for: Invalid enum value 'x'"),
        ({"model": "gpt2-xl", "gpus": "8:L4", "out": "/etc/passwd"}, "unknown field `out`"),
        ({"model": "a\0b", "gpus": "8:L4"}, "model: contains control characters"),
    ],
)
def test_settings_that_are_none_are_named(settings, says):
    with pytest.raises(BadInput, match=re.escape(says)):
        asked_of(settings)


def test_a_search_of_what_is_wrong_tells_it_in_a_line(server):
    given = {"token": server.token, "page": "p", "model": "<b>x</b>", "gpus": "8:H100"}
    error, end = events_of(asked(server, "/search", **given)[2])
    assert error["kind"] == "error" and "<b>x</b>: is neither a file nor a preset" in error["words"]
    assert end == {"kind": "end"}


def test_settings_of_a_shared_address_are_taken_without_its_token():
    shared = "http://127.0.0.1:8000/?token=secret&model=gpt2-xl&gpus=8%3AL4"
    assert query_of(shared) == query_of("?model=gpt2-xl&gpus=8%3AL4") == "model=gpt2-xl&gpus=8%3AL4"
