"""Degrees of parallelism are computed with in one file: everything else asks the axes of a strategy."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = "core/src/shardwright/plan/axes.py"
SIZES = {"tp_size", "cp_size", "dp_size", "shard_size", "ep_size", "etp_size"}
PRODUCTS = {"prod", "lcm", "gcd", "divmod", "divisors"}
EXCEPTIONS = {
    "core/src/shardwright/types/strategy.py": "the type's definition, which checks shard_size",
    "core/src/shardwright/types/run.py": "the type's definition, which checks the load of groups",
    "core/src/shardwright/types/plan.py": "the type's definition, which checks strategies against stages",
    "stages/profile/src/shardwright_profile/model/": "probes of the shares of positions that a profile lists",
    "stages/profile/src/shardwright_profile/importers/": "reads the profiles of Galvatron and FASOP, by their degrees",
    "stages/search/src/shardwright_search/systems/": "reads and writes files of other systems, by their degrees",
    "stages/search/src/shardwright_search/space/uniform.py": "one strategy for all layers, as others spell it",
    "stages/search/src/shardwright_search/uniform_plan.py": "the same, from the options of a command",
    "stages/search/src/shardwright_search/cost_model/parameters.py": "a profile's column: how the probed ranks lay",
    "stages/search/src/shardwright_search/cost_model/context.py": "a profile's column: the nearest probed share",
}


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _operands(node: ast.AST) -> list[ast.expr]:
    """What is computed with or compared."""
    match node:
        case ast.BinOp():
            return [node.left, node.right]
        case ast.AugAssign():
            return [node.target, node.value]
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Call() if _name(node.func) in PRODUCTS:
            return node.args
    return []


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    """An operand, or those of which a sign, a choice or a sequence makes it; a call is no operand of a size."""
    match node:
        case ast.UnaryOp(operand=inner):
            yield from _leaves(inner)
        case ast.IfExp(body=body, orelse=other):
            yield from (*_leaves(body), *_leaves(other))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                yield from _leaves(part)
        case ast.GeneratorExp(elt=part) | ast.ListComp(elt=part) | ast.Starred(value=part):
            yield from _leaves(part)
        case _:
            yield node


def _asks(node: ast.AST) -> bool:
    kinds = isinstance(node, ast.Attribute) and node.attr == "ULYSSES" and _name(node.value) == "SequenceParallel"
    return kinds or any(_name(part) in SIZES for operand in _operands(node) for part in _leaves(operand))


def _computes_with_sizes(source: str) -> bool:
    return any(map(_asks, ast.walk(ast.parse(source))))


@pytest.mark.parametrize(
    "source",
    [
        "ranks = strategy.tp_size * strategy.dp_size",
        "share = samples // (self.strategy.dp_size)",
        "if tp_size > 1: pass",
        "size = lcm(source.tp_size, 2)",
        "rows -= plan.head.shard_size",
        "ranks = 1 if strategy.sequence_parallel is SequenceParallel.ULYSSES else 2",
        "match kind:\n    case SequenceParallel.ULYSSES: pass",
        "groups = -(-length // tp_size)",
        "product = prod([tp_size, 2])",
    ],
)
def test_what_computes_with_a_size_is_seen(source):
    assert _computes_with_sizes(source)


def test_a_name_of_a_column_or_a_field_is_no_computation():
    assert not _computes_with_sizes("key = LayerKey(tp_size=strategy.tp_size)\nsize = max(1, key.without('tp_size'))")


def test_only_the_axes_compute_with_degrees():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split() if "/src/" in name or name.startswith("workflow/")]
    asking = {name for name in files if (ROOT / name).exists() and _computes_with_sizes((ROOT / name).read_text())}
    assert HOME in asking
    excepted = {name: next((start for start in EXCEPTIONS if name.startswith(start)), None) for name in asking}
    assert {name for name, start in excepted.items() if start is None} == {HOME}
    assert set(EXCEPTIONS) == set(excepted.values()) - {None}, "an exception that nothing needs any more goes"
