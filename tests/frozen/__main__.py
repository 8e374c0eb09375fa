"""What must not change: searches and other uses through the command lines, held to what they once gave.

    python tests/frozen check [DIR]     # run all cases; name every output that differs from the frozen one
    python tests/frozen write DIR       # the same, without comparing: `diff -r` two revisions' DIR/canonical
    python tests/frozen freeze          # take today's outputs as the frozen ones

`--describe` also describes a model of each family anew (slow: torch) and holds that to the committed description.
Whole outputs are below DIR (results/frozen), as they are compared below DIR/canonical. How to state that a spelling
changed on purpose: `CORRECTIONS` in canonical.py for outputs; `VERSIONS`, `REWRITTEN` and `as_measured` in given.py for
inputs.
"""

import argparse
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from canonical import Given, canonical, numbers
from cases import CHANGED, DESCRIBED, ROUNDS, Case
from given import HERE as COMMITTED
from given import write_given
from searches import write_searches

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HASHES, NUMBERS = HERE / "frozen.sha256", HERE / "frozen.numbers"
GIVEN = ("clusters", "settings", "galvatron", "reference", "searches", "measured", "models", "canonical")
WORKERS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}


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
        if path.is_file() and not skipped and path.suffix not in (".h5", ".toml"):
            found[name] = canonical(name, path.read_text(), given)
    for name, text in found.items():
        (folder / "canonical" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "canonical" / name).write_text(text)
    return found


def hashes_of(found: dict[str, str]) -> str:
    """A line for each output."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(found.items()))


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
    frozen = {line[66:]: line[:64] for line in HASHES.read_text().splitlines()}
    now = {line[66:]: line[:64] for line in hashes_of(found).splitlines()}
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
        config = yaml.safe_load((ROOT / f"config/models/{preset}.yaml").read_text())["config"] | CHANGED.get(name, {})
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
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results" / "frozen")
    parser.add_argument("--describe", action="store_true", help="describe the families' models anew, too")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    run_all(folder)
    found = outputs(folder)
    good = True
    if asked.what == "freeze":
        HASHES.write_text(hashes_of(found))
        NUMBERS.write_text(numbers_of(found))
    elif asked.what == "check":
        good = check(found, folder)
    if asked.describe:
        good = describe(folder) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
