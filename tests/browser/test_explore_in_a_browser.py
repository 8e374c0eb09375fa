"""The page of `explore` in a real browser: keys alone, from the empty page to the files that start a plan."""

import json
import stat
from threading import Thread
from time import monotonic, sleep
from zipfile import ZipFile

import pytest
from driven import LOOK, a_tab

from shardwright_search.explore.server import Explorer

CONFIG = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "max_position_embeddings": 2048,
}  # fmt: skip
KIND = "document.getElementById('status').dataset.kind"


@pytest.fixture(scope="module")
def tab():
    with a_tab() as tab:
        yield tab


@pytest.fixture(scope="module")
def server():
    with Explorer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.end_all()
        server.shutdown()


def go_to(tab, name):
    """Press Tab until something with this id has the focus."""
    for _ in range(40):
        if tab.run("document.activeElement.id") == name:
            return
        tab.press("Tab")
    raise AssertionError(f"Tab never comes to {name}")


def choose(tab, name, value):
    """Choose from a list by its arrows."""
    go_to(tab, name)
    for _ in range(60):
        if tab.run(f"document.getElementById('{name}').value") == value:
            return
        tab.press("ArrowDown")
    raise AssertionError(f"{name} has no {value}")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, True)])
def test_keys_alone_lead_from_the_empty_page_to_the_files_that_start_a_plan(tmp_path, tab, server, width, dark):
    (tmp_path / "small.json").write_text(json.dumps(CONFIG))
    tab.open(server.address(), width, dark=dark)
    assert tab.run("document.getElementById('status').textContent") == "Choose a model and a device."
    assert tab.run(LOOK) == []
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 25, 29)" if dark else "rgb(255, 255, 255)")
    go_to(tab, "model")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.type(str(tmp_path / "small.json"))
    choose(tab, "device", "A100-80")
    go_to(tab, "batch")
    tab.type("64")
    tab.wait(f"{KIND} == 'done'")
    first = tab.run("document.querySelector('.tile b').textContent")
    assert tab.run("document.querySelectorAll('svg').length") == 8
    assert (
        tab.run("[...document.querySelectorAll('svg')].filter(each => each.getBoundingClientRect().width).length") == 4
    )
    assert tab.run(LOOK) == []
    go_to(tab, "keep")
    tab.press("Enter")
    choose(tab, "for", "torchtitan")
    tab.wait("location.search.includes('torchtitan')")
    tab.wait(f"{KIND} == 'done' && document.getElementById('launch').href")
    go_to(tab, "keep")
    tab.press(" ")
    cards = "[...document.querySelectorAll('.card')].map(each => each.innerText)"
    here, there = tab.run(cards)
    assert first in here and "this runtime" in here and "torchtitan" in there
    assert tab.run(LOOK) == []
    go_to(tab, "launch")
    tab.press("Enter")
    file, end = tab.downloads / "launch.zip", monotonic() + 30
    while not file.exists():
        assert monotonic() < end, "nothing was downloaded"
        sleep(0.05)
    with ZipFile(file) as archive:
        modes = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()}
    file.unlink()
    assert modes["launch/node.sh"] == 0o755 and modes["launch/torchtitan.toml"] == 0o644
    assert {"launch/skypilot.yaml", "launch/trainjob.yaml", "launch/jobset.yaml", "launch/slurm.sh"} < set(modes)
    # The address has all of it: opened again, the same stands there.
    tab.open(tab.run("location.href"), width, dark=dark)
    tab.wait(f"{KIND} == 'done' && {cards}.every(each => each.includes('a billion tokens'))")
    assert tab.run(cards) == [here, there]
    assert tab.run("document.getElementById('for').value") == "torchtitan"
    assert tab.run("document.querySelectorAll('.card button').length") == 2


def test_a_change_ends_the_last_search_and_shows_the_best_plan_so_far(tab, server):
    tab.open(server.address("model=mixtral-8x7b&gpus=32x8:H100-SXM&batch=1024"), 1280)
    tab.wait(f"{KIND} == 'so far' && document.querySelectorAll('#plan svg').length")
    (running,) = server._children.values()
    assert "the best plan so far" in tab.run("document.getElementById('status').textContent") or running.poll() is None
    tab.run("document.getElementById('model').select()")
    tab.type("no-such-model")
    tab.wait(f"{KIND} == 'error'")
    assert running.wait(10) < 0, "killed"
    assert "is neither a file nor a preset" in tab.run("document.getElementById('status').textContent")
    assert tab.run("document.getElementById('plan').parentElement.className") == "stale"


def test_what_does_not_fit_says_what_would(tab, server):
    tab.open(server.address("model=llama-3-70b&gpus=1x8:A100-40&batch=64"), 420)
    tab.wait(f"{KIND} == 'none'")
    assert "--gpus" in tab.run("document.getElementById('status').textContent") and tab.run(LOOK) == []
