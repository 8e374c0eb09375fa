"""Write benchmarks/results/types.md, of each causal type of transformers, and its summary in docs/models.md.

    python docs/site/types_table.py            # rewrite both, from docs/models.json and the facts
    python docs/site/types_table.py --check    # exit 1 if they are not up to date

docs/models.json is measured: `python tests/train/run_types.py --record`.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES, OTHER_NAMES, TRACED_TOWERS

PAGE = Path(__file__).parents[1] / "models.md"
TABLE = Path(__file__).parents[2] / "benchmarks/results/types.md"
RECORD = Path(__file__).parents[1] / "models.json"
_BEGIN, _END = "<!-- types_table.py -->\n", "<!-- end -->\n"
_EVERYWHERE = "DeepSpeed, accelerate"


def table(record: Mapping[str, Any]) -> str:
    """The table of a record: types that have the same said of them share a row."""
    rows: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for kind, found in record["types"].items():
        rows[_said(kind, found)].append(f"`{kind}`")
    return "".join(
        (
            "# Causal types of transformers\n\n",
            "Written by `python docs/site/types_table.py`; see [models.md](../../docs/models.md#by-a-trace).\n\n",
            "| types | known by | trained | exported to |\n| --- | --- | --- | --- |\n",
            *(f"| {', '.join(kinds)} | {' | '.join(said)} |\n" for said, kinds in sorted(rows.items(), key=_order)),
        )
    )


def summary(record: Mapping[str, Any]) -> str:
    """How many types of a record train, and with what."""
    exact = sum("exact" in found for found in record["types"].values())
    divided = sum("exact" in found and "undivided" not in found for found in record["types"].values())
    of = f"{len(record['types'])} causal types of transformers {record['transformers']}"
    how = f"tiny models in float64 on 2 ranks, {record['measured']}"
    return (
        f"Of the {of}, {exact} train exactly as their stock class ({how}), with facts or without, {divided} of them "
        "under tensor parallelism as well. [Each type, what it can do, or why not]"
        "(../benchmarks/results/types.md).\n"
    )


def _order(row: tuple[tuple[str, str, str], list[str]]) -> tuple[str, bool, int]:
    (known, trained, _), kinds = row
    return known, not trained.startswith("exactly"), -len(kinds)


def _said(kind: str, found: Mapping[str, Any]) -> tuple[str, str, str]:
    family = FAMILIES.get(OTHER_NAMES[kind].family if kind in OTHER_NAMES else kind)
    if family is not None and family.untrained is not None:
        return "facts", f"no: {family.untrained}", _EVERYWHERE
    if kind in TRACED_TOWERS:
        return "trace", f"no: {TRACED_TOWERS[kind]}", ""
    if family is not None:
        return "facts", "exactly", ", ".join(_systems(family))
    if "exact" in found:
        return "trace", "exactly, tp_size 1" if "undivided" in found else "exactly", _EVERYWHERE
    reason = str(found["refused"])
    described = not reason.startswith(("not described: ", "no tiny"))
    why = re.sub(r"\(\w+(Error|Exception): (.*)\)$", r"(\2)", reason.removeprefix("not described: "))
    return "trace" if described else "nothing", "no: " + why.replace("|", "\\|"), _EVERYWHERE if described else ""


def _systems(family: Family) -> Iterator[str]:
    if family.systems.megatron is not None:
        yield "Megatron-LM"
    if family.systems.torchtitan is not None:
        yield "torchtitan"
    yield _EVERYWHERE


def main(*, check: bool) -> int:
    """Rewrite both files, or say whether they are up to date."""
    record = json.loads(RECORD.read_bytes())
    page = PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    made = {PAGE: f"{before}{_BEGIN}{summary(record)}{_END}{after}", TABLE: table(record)}
    old = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if check:
            print(f"{path} is not up to date: python {Path(__file__).name}", file=sys.stderr)
        else:
            path.write_text(made[path])
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
