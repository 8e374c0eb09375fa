"""How far predictions are from measured step times and memory: own plans on this machine, and what others published.

    python benchmarks/accuracy.py public --reference FOLDER          # playbook, bloom, torchtitan, llm_foundry, nvidia
    python benchmarks/accuracy.py public --reference FOLDER --terms  # before and after, term by term
    python benchmarks/accuracy.py sailor aceso --reference FOLDER --rows
    python benchmarks/accuracy.py own --plans 30 --seed 1 --work /tmp/accuracy       # 80 probes and 31 plans, 3 times
    python benchmarks/accuracy.py own --measurement M.json --hardware H.h5 --profile P.h5

`own` draws plans on two processes from the whole space, predicts them, and measures them with the searched one.
`public`, `sailor` and `aceso` read what others measured, which is not part of this repository: --reference is its
folder.
Errors are |predicted / measured - 1|. docs/accuracy.md says which constants are fitted, and to which of these runs.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from accuracy_parts import aceso, own, sailor
from accuracy_parts.figures import Compared, figures, show
from accuracy_parts.public.show import page_text, told, told_terms
from harness import write_json

from shardwright.io import BadInput, one_line_errors
from shardwright.io.versions import versions_text

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("own", "sailor", "aceso", "public")


def main() -> None:
    """Make, print and write the comparisons that the arguments ask for."""
    asked = _arguments()
    with one_line_errors():
        if "own" in asked.parts:
            _own(asked)
        if "sailor" in asked.parts:
            folder, variants = _reference(asked, "sailor"), ("validation", "planner")
            _keep(
                asked,
                "sailor",
                [row for variant in variants for row in sailor.compared(folder, variant, asked.process_gib)],
            )
        if "aceso" in asked.parts:
            _keep(asked, "aceso", list(aceso.compared(_reference(asked, "aceso"))))
        if "public" in asked.parts:
            folder = _reference(asked, "playbook").parent
            sets = told_terms(folder) if asked.terms else told(folder, asked.rows)
            name = "accuracy-public-terms.json" if asked.terms else "accuracy-public.json"
            _write(asked.out / name, sets)
            if not asked.terms:
                (asked.out / "accuracy-public.md").write_text(page_text(sets), encoding="utf-8")


def _own(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        work = asked.work or Path(place)
        work.mkdir(parents=True, exist_ok=True)
        inputs = own.prepare(work, ROOT, asked.hardware)
        settings = {"steps": asked.steps, "warmup-steps": 1, "min-time-s": asked.min_time_s}
        if asked.measurement:
            taken = [own.Round(asked.profile, asked.measurement)]
        else:
            taken = list(own.rounds(work, inputs, asked.profile, asked.plans, asked.seed, settings, asked.rounds))
        rows = own.compared(taken, inputs)
    found = own.verdict(rows)
    _keep(
        asked,
        "own",
        rows,
        plans=asked.plans,
        seed=asked.seed,
        rounds=len(taken),
        measured=settings,
        **found,
        rows=[row._asdict() for row in rows],
    )
    print(f"rank correlation (Spearman) of predicted and measured step times: {found['spearman']:.3f}")
    print(f"the searched plan takes {found['chosen_over_best_measured']:.3f} x the best measured one's time")


def _keep(asked: argparse.Namespace, part: str, found: list[Compared], **more: object) -> None:
    sets = figures(found)
    show(found, sets, asked.rows)
    _write(asked.out / f"accuracy-{part}.json", sets, **more)


def _write(path: Path, sets: list[dict[str, Any]], **more: object) -> None:
    versions = versions_text(("torch", "shardwright"), on_gpu=False)
    print(f"written: {write_json(path, None, versions=versions, **more, sets=sets)}")


def _reference(asked: argparse.Namespace, name: str) -> Path:
    """Return the folder of a set that others measured; raise BadInput if it is not given or does not exist."""
    if asked.reference is None:
        raise BadInput("--reference", f"{name} is no part of this repository", f"give the folder that {name} lies in")
    if not (folder := asked.reference / name).is_dir():
        raise BadInput(folder, "is absent", "give the folder of published measurements with --reference")
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold predictions against measured step times and memory.")
    parser.add_argument(
        "--process-gib", type=float, default=5.0, help="sailor: of a GH200's process beside its tensors, as given"
    )
    parser.add_argument("parts", nargs="*", metavar="own|sailor|aceso|public", help="default: own")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--terms", action="store_true", help="public: the errors before and after, term by term")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the figures")
    parser.add_argument("--reference", type=Path, help="folder of what others measured")
    parser.add_argument("--plans", type=int, default=30, help="random plans to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--rounds", type=int, default=3, help="profile and plans are measured so many times, in turns")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each probe and plan in a round")
    parser.add_argument("--min-time-s", type=float, default=1.0, help="and so many s at least")
    parser.add_argument("--work", type=Path, help="folder to keep profiles and measurements in, and to go on from")
    parser.add_argument("--hardware", type=Path, help="hardware profile, instead of measuring one")
    parser.add_argument("--profile", type=Path, help="model profile of the demo's model, instead of measuring one")
    parser.add_argument(
        "--measurement", type=Path, help="what `own` measured in one round, the searched plan first; wants --profile"
    )
    asked = parser.parse_args()
    asked.parts = asked.parts or ["own"]
    if odd := sorted(set(asked.parts) - set(PARTS)):
        parser.error(f"no part {odd[0]!r}: known are {', '.join(PARTS)}")
    if asked.measurement and not asked.profile:
        parser.error("--measurement wants --profile beside it")
    return asked


if __name__ == "__main__":
    main()
