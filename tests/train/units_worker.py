"""Run by the launcher, one process per rank: a worker that knows the made-up family of two_groups.py."""

import importlib

import two_groups  # noqa: F401


def main(worker: str, *arguments: str) -> None:
    importlib.import_module(worker).main(*arguments)
