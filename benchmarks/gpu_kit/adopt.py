"""Copy the results of a kit into the repository, and propose changes of the table of devices from them.

    PYTHONPATH=benchmarks python -m gpu_kit.adopt FOLDER                # results.json, report.md, everything.tgz
    PYTHONPATH=benchmarks python -m gpu_kit.adopt FOLDER --into OTHER   # into another folder, a rehearsal's too

Every proposal is printed and none is applied: the results are from one machine on one day.
"""

import argparse
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_kit.assumed import Assumption, assumptions, entry_of, lines_of
from gpu_kit.plans import of_one_device
from gpu_kit.predicted import HARDWARE, PROFILE
from gpu_kit.setting import REHEARSAL, ROOT, Setting, slug_of

from shardwright.io import BadInput, one_line_errors, read_bytes, write_bytes
from shardwright.plan.differences import MAX_RELATIVE_ERROR
from shardwright.types.hardware_profile import read_hardware_profile
from shardwright.types.model_profile import read_model_profile
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import read_profiles

_MAX_BYTES = 2**26
_TABLE = Path("core/src/shardwright/devices/devices.toml")
_ALLOWED = 0.02
"""Maximum growth of a prediction's error if formulas change: two percentage points."""
_PACKED_PROFILES = "kit/profiles"


def main() -> None:
    """Write the results into the repository, and print the proposals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what came back from the machine")
    parser.add_argument("--into", type=Path, default=ROOT, help="folder that stands for the repository")
    asked = parser.parse_args()
    with one_line_errors():
        for path in adopt(asked.folder, asked.into):
            print(f"written: {path}")
        whole = read_results(asked.folder / "results.json")
        print("\n".join(proposals(whole)))


def adopt(folder: Path, into: Path) -> list[Path]:
    """Write results, report and profiles; raise BadInput and write nothing if the folder has no valid results."""
    whole = read_results(folder / "results.json")
    if whole["what"] != "measured" and into == ROOT:
        raise BadInput(folder, f"is of a {whole['what']}", "adopt what was measured on a GPU, or give --into")
    profiles = _profiles(folder)
    noise = _noise(profiles)
    # Times of a rehearsal are noisy: other programs use the processor as well.
    if whole["what"] == "measured" and noise is not None:
        raise BadInput(folder, f"{PROFILE}.h5: the error of {noise} is above its bound", "run step S4 again")
    stem = into / "benchmarks" / "results" / f"gpu-{slug_of(whole)}-{whole['date']}"
    reference = into / "config" / "reference" / slug_of(whole)
    contents = {stem.with_suffix(".json"): read_bytes(folder / "results.json", _MAX_BYTES)}
    contents |= {stem.with_suffix(".md"): read_bytes(folder / "report.md", _MAX_BYTES)}
    contents |= {reference / f"{name}.h5": content for name, content in profiles.items()}
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return list(contents)


def read_results(file: Path) -> dict[str, Any]:
    """Read a kit's results."""
    try:
        whole: dict[str, Any] = json.loads(read_bytes(file, _MAX_BYTES))
        missing = {"what", "device", "date", "commit", "steps"} - whole.keys()
    except (ValueError, AttributeError) as error:
        raise BadInput(file, f"holds no results of the kit ({error})", "give the folder that came back") from None
    if missing:
        raise BadInput(file, f"holds no {sorted(missing)[0]}", "give the folder that came back")
    return whole


def _profiles(folder: Path) -> dict[str, bytes]:
    """Return the two profiles; raise BadInput if one is missing or cannot be read."""
    archive, found = folder / "everything.tgz", dict[str, bytes]()
    if not archive.is_file():
        raise BadInput(archive, "is not there", "give the folder that came back")
    try:
        with tarfile.open(archive) as packed:
            members = {member.name.removeprefix("./"): member for member in packed}
            for name in (HARDWARE, PROFILE):
                member = members.get(f"{_PACKED_PROFILES}/{name}.h5")
                content = None if member is None else packed.extractfile(member)
                if content is None:
                    raise BadInput(archive, f"holds no {name}.h5", "run step S4 again")
                found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadInput(archive, f"cannot be read ({error})", "copy the folder again") from None
    return found


def _noise(profiles: Mapping[str, bytes]) -> str | None:
    """Return the first layer whose times are too uncertain for the profile stage; raise BadInput if one is damaged."""
    with TemporaryDirectory() as scratch:
        files = {name: Path(scratch) / f"{name}.h5" for name in profiles}
        for name, file in files.items():
            file.write_bytes(profiles[name])
        read_hardware_profile(files[HARDWARE])
        rows = read_model_profile(files[PROFILE]).layers.rows
    return next((f"{row.key}" for row in rows if max(_errors(row), default=0.0) > MAX_RELATIVE_ERROR), None)


def _errors(row: Any) -> Iterator[float]:  # noqa: ANN401
    """Yield the relative standard errors of a row's times."""
    for name in ("forward", "backward"):
        error, time_s = getattr(row, f"{name}_error_s", None), getattr(row, f"{name}_s", None)
        if error and time_s:
            yield float(error) / float(time_s)


def proposals(whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield the constants with their measured values, and a diff of the table of devices, which is not applied."""
    rows = {step: _found(entry) for step, entry in whole["steps"].items()}
    found = assumptions(whole["device"], rows.get("S2", {}), rows.get("S0"))
    yield from lines_of(found)
    yield ""
    if whole["what"] == REHEARSAL:
        yield f"A {REHEARSAL} says nothing about a device: no change is proposed."
        return
    yield f"Proposed for {_TABLE}, to be judged by a person; launch_us and context_mib are options, not entries:"
    yield from table_diff(entry_of(whole["device"])[0], found, f"{whole['device']}, {whole['date']}")


def _found(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for name, row in entry["rows"].items() if "error" not in row}


def table_diff(key: str, found: Sequence[Assumption], source: str) -> Iterator[str]:
    """Yield a unified diff of the table of devices, with measured values in the device's entry."""
    old = (ROOT / _TABLE).read_text(encoding="utf-8").splitlines()
    new, inside = [], False
    measured = {one.entry: one.measured for one in found if one.entry is not None and one.measured is not None}
    for line in old:
        inside = line == f"[devices.{key}]" if line.startswith("[") else inside
        name = line.partition(" = ")[0]
        if inside and name in measured:
            line = f"{name} = {measured[name]:.3f}"
        elif inside and name.removesuffix("_source") in measured:
            line = f'{name} = "benchmarks/gpu_kit on one {source}"'
        new.append(line)
    yield from unified_diff(old, new, f"a/{_TABLE}", f"b/{_TABLE}", lineterm="")


def worse_predictions(whole: Mapping[str, Any], reference: Path) -> list[str]:
    """Return a sentence for each plan that is predicted worse from the kept profile than on the day of measurement."""
    setting, rows = setting_of(whole), _found(whole["steps"]["S4"])
    profiles = read_profiles((reference / f"{HARDWARE}.h5",), (reference / f"{PROFILE}.h5",))
    worse = []
    for name, case in of_one_device(setting).items():
        row = rows.get(name)
        if not case.is_profiled or row is None:
            continue
        estimate = evaluate(case.plan, profiles, cost_model_of(case.plan, profiles), timeline=False).estimate
        for what, now in (("s", estimate.simulated_step_time_s), ("bytes", estimate.memory_bytes)):
            measured = row[f"measured_{what}"]
            then, error = abs(row[f"profiled_{what}"] / measured - 1), abs(now / measured - 1)
            if error > then + _ALLOWED:
                worse.append(f"{name}: {what}: error {error:.3f}, {then:.3f} when it was measured")
    return worse


def setting_of(whole: Mapping[str, Any]) -> Setting:
    """Return the setting for which the plans of some results were made."""
    memory = whole["steps"]["S0"]["rows"]["versions"]["memory_bytes"]
    return Setting(
        device_type="cpu" if whole["what"] == REHEARSAL else "cuda",
        device=whole["device"],
        devices=whole["devices"],
        memory_bytes=memory,
        versions=whole["versions"],
        work=Path(),
        carried=Path(),
    )


if __name__ == "__main__":
    main()
