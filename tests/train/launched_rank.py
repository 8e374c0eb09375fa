"""A rank without torch, started by the launcher: it does the action that stands in its place on the command line."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from shardwright_formats.io.errors import BadInput, Stopped
from shardwright_train.watch import Watch, be_watched


def act(action: str, acted: Path) -> None:
    """Do one thing; `later` before it waits until another rank has done its own."""
    if action.startswith("later "):
        while not acted.exists():
            time.sleep(0.02)
        time.sleep(0.2)
    acted.touch()
    match action.removeprefix("later ").split(" ", 1):
        case ["end"]:
            return
        case ["sleep"]:
            time.sleep(1000)
        case ["fail" | "linger", words]:
            raise ValueError(words)
        case ["lose"]:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:50372")
        case ["refuse"]:
            raise BadInput("plan.json", "is odd", "write another")
        case ["stop"]:
            raise Stopped("stopped after step 1")
        case ["exit", status]:
            os._exit(int(status))
        case ["signal", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case _:
            raise AssertionError(action)


def main() -> None:
    """Join, unless the action says otherwise, and act."""
    action = sys.argv[1 + int(os.environ["LOCAL_RANK"])]
    be_watched()
    if action == "never join":
        time.sleep(1000)
    watch = Watch.of_environment()
    with ExitStack() as stack:
        if action.startswith("linger"):
            stack.callback(time.sleep, 1000)  # as a process group may that is destroyed after a failure
        stack.push(watch.note)
        watch.begin("in step 1")
        act(action, Path(os.environ["SHARDWRIGHT_RANK_FILES"]).with_name("acted"))


if __name__ == "__main__":
    main()
