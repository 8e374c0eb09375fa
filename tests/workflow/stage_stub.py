"""Takes the place of the stages' commands: notes how it was called, and writes sample results where it was told to.

Run as the program shardwright.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import sample_results
from sample_results import write_sample_results

_INPUTS = (
    "--cluster", "--model", "--hardware", "--profile", "--search", "--settings", "--data", "--plan", "--correction",
)  # fmt: skip
_TOKEN_FILES = ("tokenizer.json", "tokens.bin", "tokens.idx", "data.json")


def main() -> None:
    """Do as the command would."""
    words = 2 if sys.argv[1] in ("train", "profile") else 1
    called, arguments = " ".join(["shardwright", *sys.argv[1 : 1 + words]]), sys.argv[1 + words :]
    with Path(os.environ["STUB_CALLS"]).open("a", encoding="utf-8") as calls:
        calls.write(json.dumps([called, *arguments]) + "\n")
    if called == os.environ.get("STUB_FAILS"):
        sys.exit("error: some.json: something is wrong: do something")
    if called == os.environ.get("STUB_STOPS"):
        note = Path(os.environ["STUB_CALLS"]).with_name("stopped")
        stopped = len(note.read_text()) if note.exists() else 0
        if stopped < 2:
            note.write_text("x" * (stopped + 1))
            sys.exit(75)
    for given, following in pairwise(arguments):
        if given in _INPUTS:
            Path(following).stat()
    option = next(name for name in ("--hardware-out", "--picture", "--out") if name in arguments)
    out = Path(arguments[arguments.index(option) + 1])
    for target, content in _outputs(called, out, arguments).items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        if called == os.environ.get("STUB_KILLS"):
            os.kill(int(os.environ["SNAKEMAKE_PID"]), signal.SIGKILL)
            sys.exit(1)


def _outputs(called: str, out: Path, arguments: list[str]) -> dict[Path, bytes]:
    if "results/profiles/" in str(out):
        return {out: (Path(sample_results.__file__).parents[2] / "core/examples/model_profile.h5").read_bytes()}
    if called == "shardwright train prepare":
        return {out / name: name.encode() for name in _TOKEN_FILES}
    if called == "shardwright train convert":
        return {out / "config.json": b"{}"}
    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder)
        write_sample_results(sample, search="roomy", run="demo")
        plans = sample / "plans"
        if called == "shardwright plan":
            prediction = (plans / "roomy.prediction.json").read_bytes()
            return {out: (plans / "roomy.json").read_bytes(), out.with_suffix(".prediction.json"): prediction}
        if called == "shardwright correct":
            return {out: (sample / "corrections" / "roomy.json").read_bytes()}
        if called == "shardwright train measure" and "plans" in arguments[0]:
            return {out: (sample / "measurements" / "plans" / "roomy.json").read_bytes()}
        if called == "shardwright train run":
            checkpoints = Path(arguments[arguments.index("--checkpoints") + 1])
            shutil.copytree(sample / "runs" / "demo", checkpoints, dirs_exist_ok=True)
            return {out / path.name: path.read_bytes() for path in (sample / "runs" / "demo").iterdir()}
    return {out: " ".join(arguments).encode()}


if __name__ == "__main__":
    main()
