"""Optimizers and devices have one home each: nobody else counts an optimizer's states or names a device's figures."""

import ast
import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from shardwright.devices.table import read_devices
from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.types import Plan

ROOT = Path(__file__).resolve().parents[2]
OF_OPTIMIZERS, OF_DEVICES = "core/src/shardwright/optimizers/", "core/src/shardwright/devices/"
STATES = re.compile(r"optimizer|adam|states?_bytes|states_beyond", re.IGNORECASE)


def _number(node):
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _counts(tree):
    """Whether a whole number multiplies anything here, or stands for all of it."""
    products = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    factors = [side for node in products for side in (node.left, node.right)]
    return any(_number(node) and node.value > 1 for node in [tree, *factors])


def _counts_states(source):
    """Whether what is named after an optimizer's states is a number of bytes, or computed with one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name, body=body) if STATES.search(name):
                parts = body
            case ast.keyword(arg=str(name), value=value) if STATES.search(name):
                parts = [value]
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if STATES.search(name):
                parts = [value]
            case ast.Constant(value=str(name)) if name.startswith("exp_avg") and "dtype" not in name:
                return True
            case _:
                continue
        if any(map(_counts, parts)):
            return True
    return False


NAMES = {name for key, device in read_devices().devices.items() for name in (key, *device.names, *device.short_names)}


def _names_figures(source):
    """Whether a device is named, or a rate like that of its products, in FLOP/s; limits are powers of ten."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    rates = (node.value for node in constants if _number(node) and 1e13 < node.value < 1e17)
    if any(rate not in (1e14, 1e15, 1e16) for rate in rates):
        return True
    # Solvers have other peaks, of memory.
    reads = "shardwright.devices" in source and re.search(r"\.peaks\b", source)
    return bool(reads) or any(node.value in NAMES for node in constants if isinstance(node.value, str))


def _product():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split() if "/src/" in name or name.startswith("workflow/")]
    return {name: (ROOT / name).read_text() for name in files if (ROOT / name).exists()}


@pytest.mark.parametrize(
    "source",
    [
        "StateRow(optimizer_bytes=2 * stored * trained)",
        "memory = Memory(optimizer=2 * shard_bytes)",
        "_STATE_BYTES = 12",
        "def states_beyond_budget(model): return model.count * stored + trained * (2 * stored + reduced)",
        "def state_bytes(self): return sum(2 * p.numel() for p in self.parameters)",
        "def optimizer_time_s(kind): return kind.count * (6 * stored + 4 * reduced)",
        "for moment in ('exp_avg', 'exp_avg_sq'): pass",
    ],
)
def test_what_counts_an_optimizers_states_is_seen(source):
    assert _counts_states(source)
    assert not _counts_states("optimizer = chosen.state_bytes(stored * trained)\nhalf = 2 * size")


@pytest.mark.parametrize("source", ["RATES = {'H100-SXM': 3}", "peak = 989.5e12", "short = {'H100': key}"])
def test_what_names_a_devices_figures_is_seen(source):
    assert _names_figures(source)
    assert not _names_figures("step_ps = 1e12 * step_s\nfix = 'write for example 8x8:H100-SXM'")


def test_only_the_home_of_optimizers_counts_their_states():
    found = {name for name, source in _product().items() if _counts_states(source)}
    assert {name for name in found if not name.startswith(OF_OPTIMIZERS)} == set()


def test_only_the_home_of_devices_names_their_figures():
    found = {name for name, source in _product().items() if _names_figures(source)}
    assert {name for name in found if not name.startswith(OF_DEVICES)} == set()


def test_a_plan_may_name_every_optimizer_that_there_is():
    assert set(get_args(Plan.__annotations__["optimizer"])) == set(OPTIMIZERS)
    assert all(name == optimizer.name for name, optimizer in OPTIMIZERS.items())
