"""Commands for a system that only this process has: `python made_up_system.py FOLDER CONFIG PLAN...`.

It is entered as docs/architecture.md says: one entry, a name in `System`, a line in the registry. Prints, as JSON, the
exit code, the output and the errors of each command.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from edited_modules import edit_modules

_LINE, _IMPORT = "    System.TORCHTITAN: TORCHTITAN,\n", "from shardwright_search.systems.torchtitan"
edit_modules(
    {
        "shardwright_search.options": [
            ('    TORCHTITAN = "torchtitan"\n', '    TORCHTITAN = "torchtitan"\n    MADE_UP = "made-up"\n')
        ],
        "shardwright_search.systems.registry": [
            (_LINE, f"{_LINE}    System.MADE_UP: MADE_UP,\n"),
            (_IMPORT, f"from made_up_entry import MADE_UP\n{_IMPORT}"),
        ],
    }
)

from command_calls import call  # noqa: E402

from shardwright_search.cli import APP  # noqa: E402


def main(folder: Path, config: str, *plans: str) -> None:
    """Advise for the system, price its file, and export the plans."""
    asked = "advise", config, "--gpus", "4:H100-SXM", "--batch", 16, "--seq", 64
    file = folder / "launch/plan.made-up"
    commands = {
        "advise": (*asked, "--for", "made-up", "--launch", folder / "launch"),
        "against": (*asked, "--against", file),
        **{plan: ("export", plan, "--to", "made-up", "--out", folder / "out") for plan in plans},
    }
    done = {name: call(APP, *words) for name, words in commands.items()}
    print(json.dumps({name: [each.exit_code, each.output, each.stderr] for name, each in done.items()}))


main(Path(sys.argv[1]), *sys.argv[2:])
