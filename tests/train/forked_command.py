"""`shardwright-train` forked from this process, which has imported everything, and its ranks forked from that.

Starting as users do takes each process 4 s of a core before it does anything. All else is as it is for users: the
launcher starts, watches and ends ranks, which are children of its own that can be killed and end with it.
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shardwright_launch import ranks
from shardwright_train import cli, commands, worker
from shardwright_train.imports import without_collection

with without_collection():
    from transformers.models.llama import modeling_llama  # noqa: F401

    from shardwright_train.training import loop  # noqa: F401

__all__ = ["commands", "forked_command"]

_FIRST_OWN_FD, _MANY_FDS = 3, 1 << 16
_STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


def forked_command(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """The command with these arguments; standard error is piped."""
    return _Forked(lambda: _command(arguments), os.environ, **_STREAMS)


class _Forked(subprocess.Popen[Any]):
    """A child that calls something in place of executing a program."""

    def __init__(self, do: Callable[[], None], environment: Mapping[str, str], **options: Any) -> None:
        super().__init__([sys.executable], preexec_fn=lambda: _become(do, environment), **options)


def _command(arguments: Sequence[str]) -> None:
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE")}
    ranks.subprocess = SimpleNamespace(Popen=_rank, **names)  # type: ignore[assignment]
    sys.argv = ["shardwright-train", *arguments]
    cli.main()


def _rank(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    assert command[1:3] == ["-m", worker.__name__], command
    return _Forked(lambda: worker.main(*command[3:]), env, **options)


def _become(do: Callable[[], None], environment: Mapping[str, str]) -> None:
    """Do something and end, in a child whose standard streams are in place and whose parent waits for it to execute."""
    status = 1
    try:
        os.closerange(_FIRST_OWN_FD, _MANY_FDS)  # as executing would; the parent waits for that
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        do()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
