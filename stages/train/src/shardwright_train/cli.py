"""The commands of `shardwright train`."""

from typing import NoReturn

from shardwright.command import Command, CommandLine, run
from shardwright_train import options

_COMMANDS = "shardwright_train.commands"

APP = CommandLine(
    name="shardwright train",
    purpose="Train a Transformer exactly as a plan says, and measure what plans take.",
    commands={
        "describe": Command(options.DescribeOptions, f"{_COMMANDS}.documents:describe"),
        "prepare": Command(options.PrepareOptions, f"{_COMMANDS}.documents:prepare_text"),
        "run": Command(options.RunOptions, f"{_COMMANDS}.ranks:start_run"),
        "convert": Command(options.ConvertOptions, f"{_COMMANDS}.documents:convert"),
        "check": Command(options.CheckOptions, f"{_COMMANDS}.documents:check"),
        "measure": Command(options.MeasureOptions, f"{_COMMANDS}.ranks:start_measure"),
    },
)


def main() -> NoReturn:
    """Run the command line."""
    run(APP)


if __name__ == "__main__":
    main()
