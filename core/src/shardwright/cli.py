"""The command `shardwright`: the planner's commands, and the commands of each other stage after the stage's name."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NoReturn

from shardwright.command import Command, CommandLine, run
from shardwright.command.command_line import show
from shardwright.io import BadInput
from shardwright.io.versions import product_version

_GROUP = "shardwright.commands"
"""Group of entry points by which stages register their command lines, each under the name of the stage."""
_PLANNER = "search"
"""The stage whose commands need no name before them."""
_OTHERS = ("profile", "train")


class Program(CommandLine):
    """A command line that imports a stage only if the first word requires one of its commands."""

    def call(self, arguments: Sequence[str]) -> int:
        """Run the command that the arguments specify, and return its exit code; BadInput if its stage is missing."""
        word = next(iter(arguments), "")
        if word == "--version":
            show(f"{self.name} {product_version()}")
            return 0
        stages = {entry.name: entry for entry in entry_points(group=_GROUP)}
        if word in _OTHERS:
            if word not in stages:
                raise BadInput(f"{self.name} {word}", "is not installed", f"pip install shardwright-{word}")
            app = stages[word].load()
            return CommandLine(f"{self.name} {word}", app.purpose, app.commands).call(arguments[1:])
        commands: dict[str, Command] = dict(stages[_PLANNER].load().commands) if _PLANNER in stages else {}
        if word not in {"batch", *(name.split()[0] for name in commands)}:
            for stage in filter(stages.__contains__, _OTHERS):
                commands |= {f"{stage} {name}": command for name, command in stages[stage].load().commands.items()}
        return CommandLine(self.name, self.purpose, commands).call(arguments)


APP = Program(
    name="shardwright",
    purpose="Find the fastest way to distribute the training of a Transformer, prove it, and train with it.\n\n"
    "Measuring hardware and training need torch: pip install 'shardwright[train]'.",
    commands={},
)


def main() -> NoReturn:
    """Run the command line."""
    run(APP)


if __name__ == "__main__":
    main()
