"""The commands of shardwright: the planner's, and those of each other stage behind the stage's name."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from shardwright.options import NewOptions
from shardwright_formats.command import Command, CommandLine, run
from shardwright_formats.io import BadInput
from shardwright_search.cli import APP as SEARCH

_PLANNER = ("advise", "plan", "rent", "explain", "export")
_STAGES = ("profile", "train")
"""Stages whose commands are several words, as `train run`, and which need not be installed."""


class Program(CommandLine):
    """A command line with the commands of stages, which it imports only where its first word asks for them."""

    def call(self, arguments: Sequence[str]) -> int:
        """Run what the arguments ask for and return its exit code; BadInput where its stage is not installed."""
        word = next(iter(arguments), "")
        stages = () if word in self.commands else (word,) if word in _STAGES else tuple(filter(_is_installed, _STAGES))
        commands = {f"{stage} {name}": each for stage in stages for name, each in _commands_of(stage).items()}
        return CommandLine(self.name, self.purpose, {**self.commands, **commands}).call(arguments)


def _is_installed(stage: str) -> bool:
    return find_spec(f"shardwright_{stage}") is not None


def _commands_of(stage: str) -> dict[str, Command]:
    if not _is_installed(stage):
        remedy = "pip install 'shardwright[train]'"
        raise BadInput(f"shardwright {stage}", f"there is no package shardwright-{stage}", remedy)
    return dict(import_module(f"shardwright_{stage}.cli").APP.commands)


APP = Program(
    name="shardwright",
    purpose="Find the fastest way to distribute the training of a Transformer, prove it, and train with it.\n\n"
    "profile and train come with shardwright[train]; shardwright-search has further commands of the planner.",
    commands={
        **{name: SEARCH.commands[name] for name in _PLANNER},
        "new": Command(NewOptions, "shardwright.new:write_configuration"),
    },
)


def main() -> NoReturn:
    """Run the command line."""
    run(APP)


if __name__ == "__main__":
    main()
