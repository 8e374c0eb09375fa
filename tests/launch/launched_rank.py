"""A rank without torch, started by the launcher: it does the action that stands in its place on the command line."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from shardwright.io import BadInput, ShardwrightError, Stopped
from shardwright.launch.heartbeat import Heartbeat, start_rank


def act(action: str, folder: Path) -> None:
    """Do one thing; `later` before it waits until another rank has done its own and noted its error, if it has one."""
    acted = folder / "acted"
    if action.startswith("later "):
        while not acted.exists():
            time.sleep(0.02)
    match action.removeprefix("later ").split(" ", 1):
        case ["end"]:
            return
        case ["sleep" | "wait"]:
            time.sleep(1000)
        case ["fail" | "linger", words]:
            raise ValueError(words)
        case ["lose"]:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:50372")
        case ["say", words]:
            say(words)
        case ["say_and_wait", words]:
            say(words)
            acted.touch()
            time.sleep(1000)
        case ["say_and_die", words]:
            say(words)
            os.kill(os.getpid(), signal.SIGKILL)
        case ["flood", count]:
            for i in range(int(count)):
                print(f"{i:100}")
                print(f"{i:100}", file=sys.stderr)
        case ["leave_a_child"]:
            child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
            (folder / "child").write_text(str(child.pid))
        case ["refuse"]:
            raise BadInput("plan.json", "is odd", "write another")
        case ["stop"]:
            raise Stopped("stopped after step 1")
        case ["print", _]:
            print_until_stopped(folder)
        case ["exit", status]:
            os._exit(int(status))
        case ["signal", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case _:
            raise AssertionError(action)


def gather(heartbeat: Heartbeat, action: str, folder: Path) -> None:
    """Begin the step when all ranks can, so that no pause is guessed.

    With several nodes that is when the test says that their launchers have met. Until then all but a rank whose step
    is to be too long are in a step, too.
    """
    several = "SEVERAL_NODES" in os.environ
    if several and action != "sleep":
        heartbeat.begin("in step 1")
    be_there(folder)
    while not (folder / "met").exists() if several else len([*folder.glob("there*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    heartbeat.begin("in step 1")


def be_there(folder: Path) -> None:
    """Show that this rank runs."""
    (folder / f"there{os.environ['RANK']}").touch()


def say(words: str) -> None:
    """Say something on both streams, the second time without an end of the line, and flush neither."""
    for line in words.split("|"):
        print(line)
    print(f"{words.split('|')[-1]} in vain", end="", file=sys.stderr)


def print_until_stopped(folder: Path) -> None:
    """Print until asked to stop, then save, as a training run does."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    (folder / "ready").touch()
    while not asked:
        print("step", flush=True)
        time.sleep(0.01)
    time.sleep(0.1)
    print("the last one", flush=True)
    (folder / "saved").touch()
    raise Stopped("stopped after step 1")


def main() -> None:
    """Join, unless the action says otherwise, and act."""
    action, folder = sys.argv[1 + int(os.environ["LOCAL_RANK"])], Path(os.environ["STARTED_BY"])
    if action == "never start":
        be_there(folder)
        time.sleep(1000)
    start_rank()
    if action == "never join":
        time.sleep(1000)
    heartbeat = Heartbeat.of_environment()
    with ExitStack() as stack:
        stack.callback((folder / "acted").touch)
        if action.startswith("linger"):
            stack.callback(time.sleep, 1000)  # as a process group may that is destroyed after a failure
        stack.push(heartbeat.note)
        gather(heartbeat, action, folder)
        act(action, folder)


if __name__ == "__main__":
    try:
        main()
    except ShardwrightError as error:
        raise SystemExit(error.exit_code) from None
