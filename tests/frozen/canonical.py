"""Outputs as they are compared: with what is stated to have changed put back, and JSON without its layout."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CORRECTIONS", "Correction", "Given", "canonical", "numbers"]


class Correction(NamedTuple):
    """A change of spelling that is meant, so that it is no difference."""

    files: str
    """Which outputs, as in a shell: `*` for all."""
    pattern: str
    """A regular expression for what is written today."""
    replacement: str
    """What was written when the results were frozen."""
    reason: str


CORRECTIONS = (
    Correction(
        "*", r"\b[0-9a-f]{64}\b", "<sha256>", "hashes of inputs and plans: another layout of a file is no difference"
    ),
    Correction("printed/*", r"\b20\d\d-\d\d-\d\d\b", "<date>", "profiles are dated by the day they are made"),
    Correction(
        "printed/*",
        r"(?m)^(bounding \d+ cases|\d+ cases left:|scenario:|HiGHS: case|\d+ plans within).*\n",
        "",
        "progress on standard error tells the way, not the result",
    ),
    Correction("*.json", r'"version": \d+', '"version": 0', "formats get new versions as their keys are renamed"),
)
"""Applied in order. One for a renamed key reads Correction("*", '"new_name"', '"old_name"', "why")."""


class Given:
    """Models and clusters that commands were given: a plan says them again, which is checked and left out."""

    def __init__(self, folder: Path) -> None:
        paths = [path for kind in ("models", "clusters") for path in sorted((folder / kind).glob("*.json"))]
        self._known = {self._key(json.loads(_put_back(path.name, path.read_text()))): path.name for path in paths}

    @staticmethod
    def _key(found: dict[str, Any]) -> str:
        return json.dumps(
            {key: value for key, value in found.items() if key not in ("format", "version")}, sort_keys=True
        )

    def left_out(self, found: Any) -> Any:
        """The same JSON without them."""
        if isinstance(found, list):
            return [self.left_out(each) for each in found]
        if not isinstance(found, dict):
            return found
        if name := self._known.get(self._key(found)):
            return f"<as given: {name}>"
        return {key: self.left_out(value) for key, value in found.items()}


def canonical(name: str, text: str, given: Given) -> str:
    """The text of an output, as it is compared."""
    text = _put_back(name, text)
    if not name.endswith(".json"):
        return text
    parts = {key: given.left_out(value) for key, value in json.loads(text).items()}
    return json.dumps(parts, indent=1, sort_keys=True) + "\n"


def _put_back(name: str, text: str) -> str:
    for correction in CORRECTIONS:
        if fnmatch(name, correction.files):
            text = re.sub(correction.pattern, correction.replacement, text)
    return text


def numbers(name: str, text: str, plan_text: str) -> str:
    """One line of what matters in a prediction and its plan, both canonical."""
    estimate, plan = json.loads(text)["estimate"], json.loads(plan_text)
    memory = max(stage["memory_bytes"] for stage in estimate["stages"])
    cut = ",".join("+".join(str(high - low) for low, high in stage["layers"]) for stage in plan["stages"])
    return (
        f"{name}: objective_s {estimate['objective_s']!r}, simulated_step_time_s {estimate['simulated_step_time_s']!r},"
        f" memory_bytes {memory}, pp {len(plan['stages'])}, batch {plan['global_batch_size']},"
        f" microbatches {plan['num_microbatches']}, {plan['schedule']}, layers {cut}; {_told(plan)}"
    )


def _told(plan: dict[str, Any]) -> str:
    layers = [_spread(layer) for layer in plan["layers"]]
    counted = [f"{layers.count(each)} {each}" for each in dict.fromkeys(layers)]
    return f"embedding {_spread(plan['embedding'])}; {', '.join(counted)}; head {_spread(plan['head'])}"


def _spread(of: dict[str, Any]) -> str:
    kinds = [of["data_parallel"], of["sequence_parallel"], of.get("recompute", "none")]
    strided = "" if of["tp_consecutive"] else " strided"
    return f"tp{of['tp_size']}xdp{of['dp_size']}{strided} {' '.join(kind for kind in kinds if kind != 'none')}"
