"""Commands on plans with fields that only this process's types have: `python made_up_field.py PLAN FOLDER`.

Prints, as JSON, for each field what the types call it and what each command said.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

EDITS = {
    "shardwright.types.strategy": (
        ("    context: ContextParallel =", "    streamed: bool = False\n    context: ContextParallel ="),
        ("    etp_size: Ranks = 1\n", "    capacity: int = 0\n    etp_size: Ranks = 1\n"),
    ),
    "shardwright.types.plan": (
        ('    compile: bool = False\n    """Use', '    shadow: bool = False\n    compile: bool = False\n    """Use'),
        ("    layers: Annotated[tuple[tuple", "    priority: int = 0\n    layers: Annotated[tuple[tuple"),
    ),
    "shardwright.plan.axes": (('("type",', '("streamed", "type",'),),
}
"""A field for plans, stages, layers and experts, and for the axes, which refuse fields without an axis."""


sys.path.insert(0, str(Path(__file__).parents[1]))

from edited_modules import edit_modules  # noqa: E402

edit_modules(EDITS)

from command_calls import call  # noqa: E402

from shardwright_search.cli import APP as SEARCH  # noqa: E402
from shardwright_search.systems.registry import SYSTEMS  # noqa: E402
from shardwright_train.cli import APP as TRAIN  # noqa: E402


def said(plan: Path, out: Path, profiles: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield each command's name, standard error and exit code."""
    commands = {f"export {system}": (SEARCH, ["export", plan, "--to", system, "--out", out]) for system in SYSTEMS}
    for system in SYSTEMS:
        commands[f"launch {system}"] = SEARCH, ["export", plan, "--to", system, "--out", out, "--launch", out / "l"]
    commands |= {
        "evaluate": (SEARCH, ["evaluate", plan, *profiles, "--out", out]),
        "explain": (SEARCH, ["explain", plan, *profiles]),
        "check": (TRAIN, ["check", plan]),
        "run": (TRAIN, ["run", plan, "--data", "random", "--steps", 1, "--out", out, "--checkpoints", out]),
        "measure": (TRAIN, ["measure", plan, "--out", out]),
    }
    for name, (app, words) in commands.items():
        ended = call(app, *words)
        yield name, ended.stderr, ended.exit_code


def main(plain: Path, folder: Path, *profiles: str) -> None:
    """Print what commands say of each field."""
    places = {
        "layers[1].experts.capacity": lambda plan: plan["layers"][1]["experts"].update(capacity=1),
        "layers[1].streamed": lambda plan: plan["layers"][1].update(streamed=True),
        "shadow": lambda plan: plan.update(shadow=True),
        "stages[0].priority": lambda plan: plan["stages"][0].update(priority=1),
    }
    found = {}
    for place, change in places.items():
        document = json.loads(plain.read_bytes())
        change(document)
        path = folder / "changed.json"
        path.write_text(json.dumps(document))
        found[place] = {name: [text, code] for name, text, code in said(path, folder / "out", profiles)}
        assert not (folder / "out").exists()
    print(json.dumps(found))


main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
