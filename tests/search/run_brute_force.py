"""`make brute-force`: the solver against every plan of many random problems, and forged certificates.

python tests/search/run_brute_force.py [PROBLEMS]
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

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

__all__ = ["main"]

PROBLEMS = 10_000
_BLOCK = 100
_MORE = 2
"""Of forged certificates there are more by this factor."""
_FEWER = 10
"""Of problems whose plans are all simulated, and of several problems at once, there are fewer by this factor."""

Mistakes = Callable[[Iterable[int]], dict[int, str]]


def main(count: int) -> int:
    """Compare on all cores, say what was seen, and return the number of problems that the solver gets wrong."""
    wrong = 0
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
            blocks = [range(start, min(start + _BLOCK, total)) for start in range(0, total, _BLOCK)]
            here, spent_s, done, began_s = dict[int, str](), 0.0, 0, time.monotonic()
            for block, (found, took_s) in zip(blocks, pool.map(partial(_timed, wrong_of), blocks), strict=True):
                here, spent_s, done = here | found, spent_s + took_s, done + len(block)
                left_s = (time.monotonic() - began_s) / done * (total - done)
                told = f"{name}: {done} of {total}, {len(here)} wrong, about {left_s:.0f} s left"
                print(told, end="\r", file=sys.stderr, flush=True)
            for seed, what in here.items():
                print(f"  problem {seed}: {what}")
            print(f"{name}: {total} problems, {len(here)} wrong, {spent_s:.0f} CPU s", flush=True)
            wrong += len(here)
    return wrong


def _timed(wrong_of: Mistakes, problems: range) -> tuple[dict[int, str], float]:
    """What is wrong, and the CPU seconds that it took to see."""
    began_s = time.process_time()
    return wrong_of(problems), time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else PROBLEMS)))
