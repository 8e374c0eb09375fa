"""Other systems' options, as lists and parsers of them beside the tests: whether a file has no others."""

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

from megatron_parser import parser
from systems_parsers import (
    asked_of_accelerate,
    asked_of_deepspeed,
    asked_of_megatron,
    asked_of_torchtitan,
    launch_asked_of_accelerate,
)

from shardwright_search.options import System
from shardwright_search.systems.galvatron import strategy_of_keys

ACCEPTED = json.loads((Path(__file__).parent / "interop" / "accepted_keys.json").read_text())


def _taken_by_megatron(text):
    given = parser().parse_args(shlex.split(text))
    assert given.micro_batch_size and given.global_batch_size
    asked_of_megatron(text)


def _taken_by_torchtitan(text):
    for section, keys in tomllib.loads(text).items():
        assert set(keys) <= set(ACCEPTED["torchtitan 0.2.2"][section])
    asked_of_torchtitan(text)


def _taken_by_galvatron(text):
    assert strategy_of_keys(json.loads(text), Path("galvatron.json")).chunks >= 1


def _taken_by_deepspeed(text):
    given, accepted = json.loads(text), ACCEPTED["deepspeed 0.19.8"]
    assert set(given) <= set(accepted[""])
    for name, keys in given.items():
        assert not isinstance(keys, dict) or set(keys) <= set(accepted[name])
    ranks = given["train_batch_size"] // given["gradient_accumulation_steps"] // given["train_micro_batch_size_per_gpu"]
    assert ranks >= 1
    asked_of_deepspeed(text)


def _taken_by_megatron_bridge(text):
    accepted = ACCEPTED["megatron-bridge 0.3.1"]
    compile(text, "recipe.py", "exec")
    for field in re.findall(r"cfg\.([\w.]+) = ", text):
        section, _, key = field.rpartition(".")
        assert key in accepted[section]


def _taken_by_accelerate(text):
    accepted = ACCEPTED["accelerate 1.15.0"]
    calls = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    known = [call for call in calls if call.func.id in accepted]
    assert len(known) == 3 + ("cp_size" in text)
    for call in known:
        assert {keyword.arg for keyword in call.keywords} <= set(accepted[call.func.id])
    asked_of_accelerate(text)


def launch_file_taken_by_accelerate(text):
    given, accepted = json.loads(text), ACCEPTED["accelerate 1.15.0"]
    assert set(given) <= set(accepted[""])
    for section in ("fsdp_config", "parallelism_config"):
        assert set(given[section]) <= set(accepted[section])
    launch_asked_of_accelerate(text)


TAKEN = {
    System.ACCELERATE: _taken_by_accelerate,
    System.MEGATRON_BRIDGE: _taken_by_megatron_bridge,
    System.DEEPSPEED: _taken_by_deepspeed,
    System.MEGATRON: _taken_by_megatron,
    System.TORCHTITAN: _taken_by_torchtitan,
    System.GALVATRON: _taken_by_galvatron,
}
