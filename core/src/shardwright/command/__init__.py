"""Command lines: a command is a struct of options and a function, and every error is one line.

A command is a struct of options and a function that takes it::

    class FitOptions(Options, frozen=True, kw_only=True):
        \"\"\"Turn measured probes into a model profile.\"\"\"

        measurements: tuple[Path, ...]
        \"\"\"What the probes took, JSON; may be repeated.\"\"\"
        out: Path
        \"\"\"The model profile to write, HDF5.\"\"\"
        time_limit: Seconds | None = None
        \"\"\"Seconds after which the best so far is taken.\"\"\"

    def fit(options: FitOptions) -> None: ...

    APP = CommandLine(
        name="shardwright profile",
        purpose="Measure hardware, and write and fit the probes of a model.",
        commands={
            "fit": Command(FitOptions, "shardwright_profile.commands.fit:fit"),
            "import galvatron": Command(...),
        },
    )

    def main() -> NoReturn:
        run(APP)

- The docstring of the struct is the help of the command; the docstring of a field, or the `description` of its `Meta`,
  is the help of the option. Limits, choices and the default are added automatically.
- `batch_size: Count` is `--batch-size INT`. Every number has limits: use a type of `types.limits`, or state
  `Meta(ge=, le=)`. An enumeration or a Literal is written by its values, a `tuple[X, ...]` by repeating the option, and
  a `bool` as `--x` and `--no-x`, or with `Annotated[bool, Off("--y")]` as `--x` and `--y`.
- `plan: Annotated[Path, POSITIONAL]` is an argument without a name; `tp_size: Count = field(name="tp")` is `--tp`.
- What concerns several options (such as two that need each other) is checked in the command; raise BadInput.
- Put structs where importing them costs little, since `--help` imports them all; the function is imported when its
  command runs, with everything that it needs.
- `show(text)` prints a result. If a command also writes a file, call it before the file gets its name (inside
  `atomic_path`): if standard output cannot be written, no file may indicate success.
- Tests call `run(APP, ["fit", ...])`, which raises SystemExit.
"""

from shardwright.command.command_line import Command, CommandLine, run, show
from shardwright.command.options import POSITIONAL, Off, Options

__all__ = ["POSITIONAL", "Command", "CommandLine", "Off", "Options", "run", "show"]
