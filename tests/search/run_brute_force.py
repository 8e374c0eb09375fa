"""`make brute-force`: the solver against every plan of many random problems, and forged certificates.

python tests/search/run_brute_force.py [PROBLEMS]

What was seen goes into results/brute-force.json, from which a run that was cut goes on if no source has changed since.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from brute_force import mistakes
from certificate_attacks import accepted
from expert_problems import random_with_experts
from interleaved_problems import mistakes as interleaved_mistakes
from offload_problems import random_interleaved_with_offload, random_with_offload
from optimizer_problems import random_with_muon
from random_fronts import front_mistakes
from random_problems import random_mixed, random_spanning, random_unequal
from simulated_optimum import too_slow
from split_problems import mistakes as split_mistakes
from uniform_problems import mistakes as uniform_mistakes

from shardwright.io import write_bytes

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
PROBLEMS = 10_000
_BLOCK = 100
_MORE = 2
"""Of forged certificates there are more by this factor."""
_FEWER = 10
"""Of problems whose plans are all simulated, and of several problems at once, there are fewer by this factor."""

Mistakes = Callable[[Iterable[int]], dict[int, str]]


def main(count: int, out: Path) -> int:
    """Compare on all cores, say what was seen, and return the number of problems that the solver gets wrong.

    `out`: the JSON file of what was seen so far.
    """
    wrong, sources = 0, _hash_of_sources()
    seen: dict[str, Any] = json.loads(out.read_bytes()) if out.exists() else {}
    if seen.get("sources") != sources:
        seen = {"sources": sources, "kinds": {}}
    kinds: dict[str, Mistakes] = {
        "gpipe and 1f1b": mistakes,
        "experts beside the rest": partial(mistakes, made=random_with_experts),
        "whole matrices of Muon": partial(mistakes, made=random_with_muon),
        "offload": partial(mistakes, made=random_with_offload),
        "offload, interleaved_1f1b": partial(interleaved_mistakes, made=random_interleaved_with_offload),
        "stages of unequal width": partial(mistakes, made=random_unequal),
        "several node types": partial(mistakes, made=random_mixed),
        "stages that span node types": partial(mistakes, made=random_spanning),
        "interleaved_1f1b": interleaved_mistakes,
        "one strategy for all layers": uniform_mistakes,
        "simulated": too_slow,
        "split backward passes": split_mistakes,
        "fronts of time against price": front_mistakes,
        "forged certificates": accepted,
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, wrong_of in kinds.items():
            few = wrong_of in (too_slow, split_mistakes, front_mistakes, uniform_mistakes)
            total = count // _FEWER if few else count
            total = count * _MORE if wrong_of is accepted else total
            kind = seen["kinds"].setdefault(name, {"done": 0, "wrong": {}, "cpu_s": 0.0})
            began_s, first = time.monotonic(), kind["done"]
            blocks = [range(start, min(start + _BLOCK, total)) for start in range(first, total, _BLOCK)]
            for block, (found, took_s) in zip(blocks, pool.map(partial(_timed, wrong_of), blocks), strict=True):
                kind |= {"done": block.stop, "wrong": kind["wrong"] | found, "cpu_s": kind["cpu_s"] + took_s}
                write_bytes(out, json.dumps(seen, indent=1).encode())
                left_s = (time.monotonic() - began_s) / (block.stop - first) * (total - block.stop)
                told = f"{name}: {block.stop} of {total}, {len(kind['wrong'])} wrong, about {left_s:.0f} s left"
                print(told, end="\r", file=sys.stderr, flush=True)
            for seed, what in kind["wrong"].items():
                print(f"  problem {seed}: {what}")
            print(f"{name}: {kind['done']} problems, {len(kind['wrong'])} wrong, {kind['cpu_s']:.0f} CPU s", flush=True)
            wrong += len(kind["wrong"])
    return wrong


def _hash_of_sources() -> str:
    """The SHA-256 of the planner's sources and of the modules here that make problems."""
    made = {str(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", None)}
    files = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("stages/search/src/**/*.py"), *ROOT.glob("tests/search/*.py")]
    found = hashlib.sha256()
    for file in sorted(files):
        if "src" in file.parts or str(file) in made:
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


def _timed(wrong_of: Mistakes, problems: range) -> tuple[dict[int, str], float]:
    """What is wrong, and the CPU seconds that it took to see."""
    began_s = time.process_time()
    return wrong_of(problems), time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else PROBLEMS, ROOT / "results/brute-force.json")))
