"""The table of published runs, as it is printed and written."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from accuracy_parts.public import nvidia, sets
from accuracy_parts.public.pricing import Priced, Unpriced
from accuracy_parts.public.report import compared, far_off, tables, told_by_term
from accuracy_parts.public.runs import Run

_SETS: dict[str, Callable[[Path], list[Run]]] = {
    "playbook": sets.playbook,
    "bloom": sets.bloom,
    "torchtitan": sets.torchtitan,
    "llm_foundry": sets.llm_foundry,
    "nvidia": nvidia.nvidia,
    "megatron_bridge": nvidia.bridge,
    "mlperf": nvidia.mlperf,
}


_LEFT_OUT = {name: partial(nvidia.left_out, source=name) for name in ("nvidia", "megatron_bridge", "mlperf")}
"""Functions that count the rows of a set that no plan can express, by cause."""


def _is_dense(run: Run) -> bool:
    return run.set.startswith(("nvidia", "mlperf")) and not _has_experts(run)


def _has_experts(run: Run) -> bool:
    return "experts" in run.set or "Grok" in run.set


_KINDS: dict[str, Callable[[Run], bool]] = {
    "dense, BF16": lambda run: _is_dense(run) and run.compute == "bfloat16",
    "dense, FP8": lambda run: _is_dense(run) and run.compute == "fp8",
    "dense, NVFP4": lambda run: _is_dense(run) and run.compute == "nvfp4",
    "dense, Blackwell": lambda run: _is_dense(run) and "B" in run.machine.device,
    "experts but Grok-1": lambda run: "experts" in run.set,
    "the same, containers 26.06 and later": lambda run: "26.06" in run.set,
    "Grok-1": lambda run: "Grok" in run.set,
}
"""Runs of several sets that are also shown together."""


def told(reference: Path, every_row: bool) -> list[dict[str, Any]]:
    """Print and return the errors for each set, without calibration and calibrated by the runs on 8 GPUs."""
    kept: list[dict[str, Any]] = []
    together: list[Priced] = []
    _head()
    for folder, read in _SETS.items():
        runs = read(reference / folder)
        for name in dict.fromkeys(run.set for run in runs):
            own = [run for run in runs if run.set == name]
            for calibrate in (False, True):
                found, unpriced, factors = compared(own, calibrate)
                together += () if calibrate else found
                if found:
                    table = tables(found) | {"factors": factors._asdict()}
                    how = "calibrated" if calibrate else "uncalibrated"
                    kept.append({"set": name, "how": how, "unpriced": _reasons(unpriced), **table})
                    _line(name, how, table)
                    _more(table, unpriced, every_row, found)
        if folder in _LEFT_OUT:
            causes = _LEFT_OUT[folder](reference / folder)
            kept.append({"set": folder, "left_out": causes})
            _left_out(folder, causes)
    for name, belongs in _KINDS.items():
        table = tables([one for one in together if belongs(one.run)])
        kept.append({"kind": name, "time": table["time"], "memory": table["memory"]})
        _line(name, "all", table | {"groups": []})
    far = far_off(together)
    kept.append({"over 40 % off": far})
    print(f"{sum(map(len, far.values()))} times are over 40 % off")
    for cause, names in far.items():
        print(f"    {len(names)} {cause}")
        for name in names:
            print(f"        {name}")
    return kept


def told_terms(reference: Path) -> list[dict[str, Any]]:
    """Print and return the effect of each term of the estimates on their errors, for every set."""
    return told_by_term([run for folder, read in _SETS.items() for run in read(reference / folder)])


def _head() -> None:
    columns = " ".join(f"{what:>7}" for what in ("runs", "median", "mean", "worst", "bias"))
    print(f"{'':36} {'time':<39} {'memory':<39} {'ranks':>6} {'chosen within 5 %':>18}")
    print(f"{'':36} {columns} {columns}")


def _line(name: str, how: str, table: dict[str, Any]) -> None:
    groups = table["groups"]
    ranks = f"{fmean(g['rank_correlation'] for g in groups):6.2f}" if groups else "     -"
    near, others = (sum(g[name] <= NEAR for g in groups) for name in ("chosen_over_best", "chosen_of_others"))
    errors = " ".join(_error_text(table[what]) for what in ("time", "memory"))
    print(f"{name + ', ' + how:36} {errors} {ranks} {near:>8} ({others}) of {len(groups)}")


def _error_text(found: dict[str, float]) -> str:
    if not found:
        return " ".join(["      -"] * 5)
    return f"{found['runs']:7} " + " ".join(f"{found[what]:7.1%}" for what in ("median", "mean", "worst", "bias"))


def _more(table: dict[str, Any], unpriced: Sequence[Unpriced], every_row: bool, found: Sequence[Priced]) -> None:
    if every_row:
        for one in found:
            if one.run.measured_s:
                _row(one)
    for group in table["groups"]:
        chosen, ranks = group["chosen_over_best"] - 1, group["rank_correlation"]
        among = ""
        if doubtful := group["contradicted"]:
            among = f", {group['chosen_of_others'] - 1:+.1%} without {doubtful} that twins contradict"
        print(f"    {group['name']:52} {group['runs']:4} runs, ranks {ranks:5.2f}, chosen {chosen:+7.1%}{among}")
    print("    " + ", ".join(f"{count} {what}" for what, count in table["fits"].items() if count))
    ran, failed = (table["fits"][f"{how}, predicted to fit"] for how in ("ran", "failed"))
    if failed:
        print(f"    predicted to fit: {failed} of {ran + failed} failed, {failed / (ran + failed):.0%}")
    for reason, count in _reasons(unpriced).items():
        print(f"    {count} not priced: {reason}")


def _left_out(folder: str, causes: Mapping[str, int]) -> None:
    print(f"{folder}: {sum(causes.values())} rows are left out")
    for cause, count in causes.items():
        print(f"    {count} {cause}")


def _row(one: Priced) -> None:
    memory = f"{one.memory_error:+7.1%}" if one.run.measured_bytes else "      -"
    size = f"{one.run.measured_bytes / 2**30:6.1f}" if one.run.measured_bytes else "     -"
    ran = f"{one.run.measured_s:9.3f} s {one.time_error:+7.1%} {size} GiB {memory}"
    print(f"      {one.run.group:9} {one.run.name:40} x{one.run.num_microbatches:<4} {ran}")


def _reasons(unpriced: Sequence[Unpriced]) -> dict[str, int]:
    return dict(Counter(one.reason.split(": ", 1)[-1] for one in unpriced).most_common(4))


# The table of published runs as a page, with what is known of the misses.


NEAR = 1.05
"""Maximum ratio of the chosen plan's measured time to the best one for which a choice counts as right."""
_NOTES = Path(__file__).with_name("notes.md")
_HEAD = """# Published runs, set by set

Written by `python benchmarks/accuracy.py public --reference FOLDER` from [its JSON](accuracy-public.json).
[accuracy.md](../../docs/accuracy.md) sums it up.

| set | runs | time: median, worst, bias | memory: median, worst, bias | ranks | chosen |
| --- | ---: | --- | --- | ---: | ---: |
"""


def page_text(sets: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: uncalibrated sets with several runs, and notes on how runs are read and on large errors."""
    shown = (one for one in sets if one.get("how") == "uncalibrated" and one["time"] and one["time"]["runs"] > 1)
    return "".join((_HEAD, *map(_page_row, shown), "\n", _NOTES.read_text(encoding="utf-8")))


def _page_row(one: Mapping[str, Any]) -> str:
    cells = one["set"], one["time"]["runs"], _errors(one["time"]), _errors(one["memory"]), *_groups(one["groups"])
    return f"| {' | '.join(map(str, cells))} |\n"


def _errors(found: Mapping[str, float]) -> str:
    if not found:
        return ""
    bias = f"{found['bias']:+.1%}".replace("-", "−")
    return f"{found['median']:.1%}, {found['worst']:.1%}, {bias}".replace("%", " %")


def _groups(groups: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    if not groups:
        return "", ""
    right, of_others = (sum(g[name] <= NEAR for g in groups) for name in ("chosen_over_best", "chosen_of_others"))
    without = f" ({of_others})" if of_others != right else ""
    return f"{fmean(g['rank_correlation'] for g in groups):.2f}", f"{right}{without} of {len(groups)}"
