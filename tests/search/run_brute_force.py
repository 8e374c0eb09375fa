"""`make brute-force`: the solver against every plan of many random problems.

python tests/search/run_brute_force.py [PROBLEMS]
"""

import sys
import time
from functools import partial

from brute_force import mistakes
from interleaved_problems import mistakes as interleaved_mistakes
from random_fronts import front_mistakes
from random_problems import random_mixed, random_unequal
from simulated_optimum import too_slow

__all__ = ["main"]

PROBLEMS = 10_000
_BLOCK = 1000
_FEWER = 10
"""Of the problems whose plans are all simulated, and of fronts over several, there are fewer by this factor."""


def main(count: int) -> int:
    """Compare, say what was seen, and return the number of problems that the solver gets wrong."""
    wrong = 0
    kinds = {
        "gpipe and 1f1b": mistakes,
        "stages of unequal width": partial(mistakes, made=random_unequal),
        "several node types": partial(mistakes, made=random_mixed),
        "interleaved_1f1b": interleaved_mistakes,
        "simulated": too_slow,
        "fronts of time against price": front_mistakes,
    }
    for name, wrong_of in kinds.items():
        started, here = time.process_time(), dict[int, str]()
        total = count // _FEWER if wrong_of in (too_slow, front_mistakes) else count
        for start in range(0, total, _BLOCK):
            here |= wrong_of(range(start, min(start + _BLOCK, total)))
        for seed, what in here.items():
            print(f"  problem {seed}: {what}")
        print(f"{name}: {total} problems, {len(here)} wrong, {time.process_time() - started:.0f} CPU s", flush=True)
        wrong += len(here)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else PROBLEMS)))
