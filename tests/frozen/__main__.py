"""What must not change: searches and other uses through the command lines, held to what they once gave.

    python tests/frozen check [DIR]     # run all cases; name every output that differs from the frozen one
    python tests/frozen write DIR       # the same, without comparing: `diff -r` two revisions' DIR/canonical
    python tests/frozen freeze PATTERN  # take today's outputs of some names ('*', 'printed/show-*') as the frozen ones

`--describe` also describes a model of each family anew (slow: torch) and holds that to the committed description.
Whole outputs are below DIR (results/frozen), as they are compared below DIR/canonical. How to state that a spelling
changed on purpose: `CORRECTIONS` in canonical.py for outputs; `VERSIONS`, `REWRITTEN` and `as_measured` in given.py for
inputs. What is frozen anew for another look alone is listed in `REFROZEN` with the reason.
"""

import argparse
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from canonical import Given, canonical, numbers, tables
from cases import CHANGED, DESCRIBED, ROUNDS, Case
from given import HERE as COMMITTED
from given import write_given
from searches import write_searches

from shardwright.models.registry import read_presets

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HASHES, NUMBERS = HERE / "frozen.sha256", HERE / "frozen.numbers"
GIVEN = ("clusters", "settings", "galvatron", "reference", "searches", "measured", "models", "canonical")
WORKERS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
# OpenBLAS takes other kernels on another processor, and fits differ in their last bits: these run on all of today's.
ENVIRONMENT |= {"OPENBLAS_CORETYPE": "Haswell"}


def run_all(folder: Path) -> None:
    """Run every case in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    write_given(folder)
    write_searches(folder)
    shutil.copytree(ROOT / "config/reference", folder / "reference")
    for name in ("printed", "hardware", "profiles", "plans", "uniform", "simulated", "evaluated", "exported"):
        (folder / name).mkdir()
    with ThreadPoolExecutor(WORKERS) as pool:
        for each in ROUNDS:
            for case in each:
                make(folder, case)
            list(pool.map(lambda case: run(folder, case), [case for case in each if case.arguments]))


def make(folder: Path, case: Case) -> None:
    """Make what a case makes between commands; what that lacks is told, and missed by the commands after it."""
    if case.make is not None:
        try:
            case.make(folder)
        except (OSError, KeyError) as error:
            print(f"{case.name}: {error!r}")


def run(folder: Path, case: Case) -> None:
    """Run a case's command in the folder and keep what it prints."""
    program, *arguments = case.arguments
    command = [str(Path(sys.executable).with_name(f"shardwright-{program}")), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    asked = f"$ shardwright-{' '.join(case.arguments)}\nexit {done.returncode}\n"
    (folder / f"printed/{case.name}.txt").write_text(f"{asked}--- out\n{done.stdout}--- err\n{done.stderr}")


def outputs(folder: Path) -> dict[str, str]:
    """Every text output as it is compared, by name, also written below `canonical`."""
    given = Given(folder)
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        skipped = name.split("/")[0] in GIVEN and name != "models/swin.json"  # which a command wrote
        if path.is_file() and not skipped and path.suffix != ".toml":
            found[name] = canonical(name, tables(path) if path.suffix == ".h5" else path.read_text(), given)
    for name, text in found.items():
        (folder / "canonical" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "canonical" / name).write_text(text)
    return found


def hashes_of(found: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each output."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in found.items()}


def frozen_hashes() -> dict[str, str]:
    """The SHA-256 of each frozen output."""
    return {line[66:]: line[:64] for line in HASHES.read_text().splitlines()}


def freeze(found: dict[str, str], pattern: str) -> None:
    """Take outputs whose names match as frozen, and those alone."""
    kept = {name: sha256 for name, sha256 in frozen_hashes().items() if not fnmatch(name, pattern)}
    kept |= {name: sha256 for name, sha256 in hashes_of(found).items() if fnmatch(name, pattern)}
    HASHES.write_text("".join(f"{sha256}  {name}\n" for name, sha256 in sorted(kept.items())))
    if pattern == "*":
        NUMBERS.write_text(numbers_of(found))


def numbers_of(found: dict[str, str]) -> str:
    """A line for each prediction."""
    lines = []
    for name, text in sorted(found.items()):
        plan = name.replace(".prediction.json", ".json")
        if plan != name:
            try:
                lines.append(numbers(plan, text, found[plan]) + "\n")
            except KeyError as error:
                lines.append(f"{plan}: has no {error}: is a correction missing?\n")
    return "".join(lines)


def check(found: dict[str, str], folder: Path) -> bool:
    """Print what differs from the frozen results; whether nothing does."""
    frozen, now = frozen_hashes(), hashes_of(found)
    differ = [name for name in sorted(frozen.keys() | now.keys()) if frozen.get(name) != now.get(name)]
    lines = difflib.unified_diff(NUMBERS.read_text().splitlines(), numbers_of(found).splitlines(), "frozen", "now", n=0)
    for line in lines:
        print(line)
    for name in differ:
        state = "missing" if name not in now else "new" if name not in frozen else "differs"
        print(f"{state}: {name}")
    if differ:
        print(f"{len(differ)} of {len(frozen)} outputs are not as frozen; whole outputs: {folder / 'canonical'}")
    else:
        print(f"all {len(frozen)} outputs are as frozen")
    return not differ


def describe(folder: Path) -> bool:
    """Describe a model of each family anew; whether every description is as committed."""
    same = True
    for name, (preset, length) in DESCRIBED.items():
        config = dict(read_presets()[preset].config) | CHANGED.get(name, {})
        home = folder / "described" / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.json").write_text(json.dumps(config))
        line = f"train describe described/{name} --name {name} --sequence-length {length} --out described/{name}.json"
        run(folder, Case(f"describe-{name}", tuple(line.split())))
        made, kept = folder / f"described/{name}.json", folder / f"models/{name}.json"
        texts = [canonical(kept.name, path.read_text(), Given(folder)) for path in (made, kept) if path.exists()]
        if len(texts) < 2 or texts[0] != texts[1]:
            print(f"differs: {made} from the committed description {COMMITTED / 'models' / kept.name}")
            same = False
    return same


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python tests/frozen", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["check", "write", "freeze"])
    parser.add_argument("where", nargs="?", help="DIR, or the PATTERN of freeze")
    parser.add_argument("--describe", action="store_true", help="describe the families' models anew, too")
    asked = parser.parse_args()
    freezes = asked.what == "freeze"
    if freezes and asked.where is None:
        parser.error("freeze: which outputs? '*' for all")
    folder = Path(asked.where).absolute() if asked.where and not freezes else ROOT / "results" / "frozen"
    start_s = time.perf_counter()
    run_all(folder)
    found = outputs(folder)
    good = True
    if freezes:
        freeze(found, asked.where)
    elif asked.what == "check":
        good = check(found, folder)
    if asked.describe:
        good = describe(folder) and good
    cpu_s = sum(os.times()[:4])
    print(f"{time.perf_counter() - start_s:.0f} s, {cpu_s:.0f} CPU s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
