"""Running the project's own commands, and the documents that they read."""

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run", "write_json_document"]


def run(*command: object) -> None:
    """Run a command of this environment with one thread a process; what it says goes to standard error."""
    words = [str(word) for word in command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    print("$", *words, file=sys.stderr, flush=True)
    done = subprocess.run(words, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} {words[1]} ended with {done.returncode}")


def write_json_document(path: Path, kind: str | None, **content: object) -> Path:
    """Write a JSON file, headed by its format where it has one."""
    head = {} if kind is None else {"format": f"shardwright.{kind}", "version": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | content, indent=1) + "\n", encoding="utf-8")
    return path
