"""Only a system's entry names it: what others do about a system they read there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = re.compile("megatron|torchtitan|deepspeed|accelerate|galvatron|megatron.?bridge", re.IGNORECASE)
HOME = "stages/search/src/shardwright_search/systems/"
OTHERS = {
    "core/src/shardwright/estimate/runtimes.py": "kernels, overlap and memory, which `profile analytic` takes, too",
    "core/src/shardwright/estimate/held.py": "what runtimes hold in memory, beside their kernels",
    "core/src/shardwright/types/strategy.py": "Megatron's sequence parallelism, under its name",
    "core/src/shardwright/models/": "facts of a family: whether Megatron-LM runs it, its flavors in torchtitan",
    "stages/search/src/shardwright_search/commands/new.py": "sequence_parallel megatron, in a new configuration",
    "stages/profile/src/shardwright_profile/": "measurements of Galvatron are imported",
    "stages/search/src/shardwright_search/advise/choices.py": "the source of NVIDIA's rule of thumb",
    "stages/search/src/shardwright_search/cli.py": "`import galvatron`",
    "stages/search/src/shardwright_search/options.py": "`System`, `import galvatron`",
    "stages/search/src/shardwright_search/space/": "`megatron_gather_buffer`, a buffer of its sequence parallelism",
    "stages/train/src/shardwright_train/data/": "Megatron's format of tokens",
    "stages/train/src/shardwright_train/models/": "sequence_parallel megatron, in what to do instead",
    "workflow/": "grids of Galvatron's published figures",
}
"""Files and folders that name a system all the same, and why."""


def _named(path: Path) -> Iterator[str]:
    """Texts and names of a file's code that name a system; docstrings and comments are for people."""
    tree = ast.parse(path.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "SequenceParallel":
            continue
        texts = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        texts += [node.value] if isinstance(node, ast.Constant) and id(node) not in told else []
        yield from (text for text in texts if isinstance(text, str) and NAMES.search(text))


def test_nobody_else_names_a_system() -> None:
    roots = ("core", "stages", "workflow")
    named = {
        path.relative_to(ROOT).as_posix(): found
        for root in roots
        for path in (ROOT / root).rglob("*.py")
        if not path.is_relative_to(ROOT / HOME) and (found := [*_named(path)])
    }
    strange = {path: found for path, found in named.items() if not path.startswith(tuple(OTHERS))}
    assert not strange, "read the system's entry, or name the reason in OTHERS"
    unused = [place for place in OTHERS if not any(path.startswith(place) for path in named)]
    assert not unused, "an exception that nothing needs"
