"""Calls of a command line inside the test's own process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from shardwright.command import CommandLine, run


class Called(NamedTuple):
    """How a command ended and what it said."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams, standard output first."""
        return self.stdout + self.stderr


def call(app: CommandLine, *arguments: object) -> Called:
    """Run a command line in this process; an error that is no fault of the world outside passes through."""
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            run(app, [str(argument) for argument in arguments])
    except SystemExit as ended:
        return Called(ended.code, stdout.getvalue(), stderr.getvalue())
