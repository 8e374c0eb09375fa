"""Run by the launcher, one process per rank: a worker that knows the made-up family of two_groups.py."""

import importlib

from two_groups import registered


def main(worker: str, *arguments: str) -> None:
    with registered():
        importlib.import_module(worker).main(*arguments)
