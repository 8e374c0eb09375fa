"""Helpers of all benchmarks: running the project's commands, writing the documents that they read, and tables."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_ORDERLY_END_S = 30.0


def run(*command: object, threads: int | None = 1, timeout_s: float | None = None) -> None:
    """Run a command of this environment, with its output on standard error; raise SystemExit if it fails.

    `threads`: number of threads of a process; None: the process decides.
    """
    words = [str(word) for word in command]
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    print("$", *words, file=sys.stderr, flush=True)
    # In its own session, so that it can be ended together with all processes that it has started.
    started = subprocess.Popen(words, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        code = started.wait(timeout_s)
    except subprocess.TimeoutExpired:
        sys.exit(f"{words[0]} {words[1]} took longer than {timeout_s:.0f} s")
    finally:
        if started.poll() is None:
            _end(started)
    if code:
        sys.exit(f"{words[0]} {words[1]} ended with {code}")


def made(out: Path, *command: object) -> Path:
    """Run a command of this environment that writes a file, unless the file exists; return its path."""
    if not out.exists():
        run(*command, "--out", out)
    return out


def _end(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_ORDERLY_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def write_json(path: Path, kind: str | None, **content: object) -> Path:
    """Write a JSON file, with its format and version first if it has a format; return its path."""
    head = {} if kind is None else {"format": f"shardwright.{kind}", "version": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | content, indent=1) + "\n", encoding="utf-8")
    return path


def table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, each as soon as its row is known.

    `columns`: their names, separated by bars. A column whose name ends in a colon has numbers, aligned at the right.
    """
    names = columns.split("|")
    yield table_line(name.removesuffix(":") for name in names)
    yield table_line("---:" if name.endswith(":") else "---" for name in names)
    yield from map(table_line, rows)


def table_line(cells: Iterable[object]) -> str:
    """Return the line of a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"
