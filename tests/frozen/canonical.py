"""Outputs as they are compared: with what is stated to have changed put back, and JSON without its layout."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

__all__ = ["CORRECTIONS", "REFROZEN", "Correction", "Given", "canonical", "numbers", "tables"]


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
        "*.json",
        r'(?m)^( "reference_s": \S+,\n)(?! "robust")',
        r'\1 "robust": [],\n',
        "predictions have no list of scenarios any more, which was empty but in robust searches",
    ),
    Correction(
        "printed/*",
        r"(?m)^(bounding \d+ conf|\d+ configurations left:|\d+ plans within).*\n",
        "",
        "progress on standard error tells the way, not the result",
    ),
    Correction(
        "printed/devices.txt",
        r"(?m)^  network, GB/s: .*\n",
        "",
        "the table of devices has the network of makers' nodes",
    ),
    Correction(
        "printed/*", r"(?m)^simulated gap .*\n", "", "the summary of a plan says what no order of its passes is below"
    ),
    Correction(
        "plans/*.json",
        r" \(embedding and head are layers\)|, or a changed one with still less",
        "",
        "the scope of a proof names stages without blocks, and plans that are simulated beside the near ones",
    ),
    Correction(
        "*.json", r',\s*"versions": "shardwright(?:-search)? [^"]*"', "", "predictions name the version that made them"
    ),
    Correction("*.json", r'"version": \d+', '"version": 0', "formats get new versions as their keys are renamed"),
    Correction(
        "*", r"\bworkspace(?=\b|_)", "transient", "workspace is the field's word for what a pass holds for a moment"
    ),
    Correction("hardware/*.h5", r"(?m)^overlap/collective_", "overlap/message_", "a collective is what overlaps"),
    Correction(
        "printed/*",
        r"(?m)^(warning: |  )?absent: overlap of .*\n",
        "",
        "predictions say where nothing is known of collectives beside computation",
    ),
    Correction(
        "*.json",
        r",\s*\"absent: overlap of [^\"]*\"|(?<=\[)\s*\"absent: overlap of [^\"]*\"(,|\s*(?=\]))",
        "",
        "the same in files",
    ),
    Correction("printed/*", r"--repair\b", "--mend", "the option says repair"),
    Correction("profiles/*.h5", r"(?m)^process/communicator_.*\n", "", "profiles say what a communicator holds"),
    Correction(
        "printed/export-*", r"\bshard(ed)?(?= embedding| them| otherwise)", "spread", "sharding is the field's word"
    ),
    Correction(
        "simulated/*.svg",
        r"pipeline stages: (\d+), microbatches: (\d+)",
        r"\1 pipeline stages, \2 microbatches",
        "right in any number",
    ),
    Correction("*", r'"shard_size": 0,\s*', "", "plans say it since ZeRO can share the states out among fewer ranks"),
    Correction("*", r'"cp_size": 1,\s*|,\s*"context": "gather"', "", "plans say how positions attend across ranks"),
    Correction("*", r'"compile": false,\s*', "", "plans say it since layers can be compiled"),
    Correction("*", r',\s*"tf32": false', "", "plans say it since a GPU may round the factors of matrix products"),
    Correction("*", r'"reference_s": [\d.e-]+,\s*', "", "predictions say how fast the profiled machine was"),
    Correction("profiles/*.h5", r"(?m)^process/reference_.*\n", "", "profiles say it"),
    Correction("*", "tp_sizes every profiled divisor", "tp_sizes every divisor", "a profile has no others"),
    Correction(
        "plans/*.json",
        "no plan of it that fits, with its communicators, has",
        "no plan of it has",
        "the scope of a proof names communicators, which the search counts for each plan",
    ),
    Correction(
        "printed/plan-*", "search plan --runners-up", "search plan", "runners-up are looked for where asked for"
    ),
)
"""Applied in order. One for a renamed key reads Correction("*", '"new_name"', '"old_name"', "why")."""

REFROZEN = (
    ("p*", "plan has no second opinion of HiGHS any more, which two searches asked for; 4 outputs"),
    (
        "*",
        "analytic profiles count what layers keep as runs keep it: norms beside a part that is recomputed alone, both "
        "layouts of what attention gives under Ulysses, and no sum behind a selectively recomputed RMSNorm layer; 21 "
        "outputs",
    ),
    (
        "p*",
        "guesses of a search serve long stages, too: other runners-up and plans that explain shows beside the chosen, "
        "which is the same in all; 23 outputs",
    ),
    (
        "*",
        "messages of an all-to-all are estimated to leave at once, with the latency of one step: analytic hardware "
        "profiles, and what is planned on them",
    ),
    (
        "*[pc]*",
        "the search counts the communicators of each plan, in place of leaving room for those of most: on analytic "
        "profiles it finds faster plans (samples a second of `analytic` 1.62, of `bert-dgx` 1.22, of the others 1.0 to "
        "1.04 times as many), and says nothing of more room; 21 outputs",
    ),
    (
        "p*/*[vs][iw]*",
        "only positions with labels enter a head's matrix where ranks hold whole sequences: of ViT and Swin the class "
        "alone is summed over tensor-parallel ranks; Swin's merges hand on a quarter of the positions; 11 outputs",
    ),
    (
        "printed/[eip]*-*",
        "refusals and notes in plainer words: exports of plans whose embedding differs, an import without "
        "`--sequence-parallel`, and a note of Galvatron's profiles; 7 outputs",
    ),
    (
        "printed/export-megatron-*",
        "recomputation of all feed-forward parts is exported for Megatron-LM: two refusals name what stands in the way "
        "next",
    ),
    (
        "*",
        "analytic profiles: the host takes 42 us for a kernel, not 15, all-reduces of NVLink 4 have published "
        "times, steps between nodes take 30 us and each collective has its rate; notes name the runtime. Searches "
        "on them leave 14 % of a device free by default, name their room and the program's version, and the least "
        "simulated plan is looked for on each placement; interleaved chunks may lack layers at the ends; 187 "
        "outputs",
    ),
    (
        "p*/*",
        "a layer has one forward time for all kinds of recomputation, and noise makes none of them free: of a measured "
        "profile, whose plan had taken full recomputation for that; FASOP's activations are estimated and no longer 0, "
        "and layers that wait for their host are told; devices are more, with FP8; 28 outputs",
    ),
    (
        "*",
        "NCCL's buffers are counted from the plan in place of three communicators in every process: analytic profiles "
        "hold 1,440 MiB less and say 480 MiB of each communicator, predictions have them as a term of their own, and "
        "searches leave room for those of a middle stage",
    ),
    (
        "p*/*[is][nc]*",
        "interleaved plans are compared by one time in place of two, and solved behind the others: fewer plans near "
        "the optimum are kept, so that of two plans 0.0012 % apart in the simulation the other is taken now, with the "
        "lesser closed form; numbers of configurations solved; seven outputs",
    ),
    (
        "[pc]*",
        "runners-up of other pipeline degrees and microbatch counts are guessed: more are found, and other ones; no "
        "chosen plan or its prediction is another",
    ),
    (
        "[hp]*",
        "a group of ranks is known by how many of its ranks share a node; FASOP's bandwidth between nodes is a node's, "
        "which all groups that leave it share: plans with its network take longer; 26 outputs",
    ),
    (
        "*",
        "analytic profiles: products by device, flash kernels at their own rate, the host's launches, gradients that "
        "are added up, what single operators keep, and three communicators in a process; of profiles that are made of "
        "the table of devices, and plans and predictions made with them",
    ),
    (
        "printed/show-*",
        "one display room rounds all numbers alike: 3 digits (1.176 GiB is 1.18 GiB), µs for us, 0 s for 0 us; "
        "since then the tables of profiles are themselves compared",
    ),
    (
        "*",
        "Megatron's sequence parallelism gathers again in the backward pass, and the head keeps its logits in the "
        "compute format alone: a third more messages of the one, a third of the memory of the other",
    ),
    (
        "printed/show-profiles-t*",
        "the order in which an analytic layer's times are added: residuals of curves through them that were 0 are "
        "2e-16, or the other way round; two outputs",
    ),
    (
        "[pu]*",
        "memory of layers that DDP replicates counts the copy that their gradients are brought together in, up to "
        "25 MiB, where that is more than the layer's own workspace: nine outputs",
    ),
    (
        "*/*strided-refused*",
        "among 3 ranks, a number that no sweep measures, times lie between those of 2 and 4, with a warning where a "
        "plan needs them: the search was refused before",
    ),
    (
        "[cepu]*",
        "memory of pipeline stages counts what a rank receives for its next pass while it computes: one tensor of a "
        "cut's size more; no time and no plan differs",
    ),
    (
        "p*",
        "probes have three micro-batches, so that what a step takes beyond them is another; tables of profiles say the "
        "time of the reference workload",
    ),
    (
        "[pe]*",
        "the embedding may be alone in the first pipeline stage, and the head in the last: searches of pipelines look "
        "at more plans and pipeline degrees, and some find a better one",
    ),
    ("exported/*", "exports for Megatron-LM and torchtitan say the model too, with the lines printed about it"),
    (
        "[epsu]*",
        "collectives of data parallelism are priced by the hardware profile, with what a probe took more in its own "
        "format; the simulation gathers ZeRO-3's layers a layer ahead and none that is spared; two more probes",
    ),
    (
        "[pes]*",
        "of plans the one of the least simulated time is taken, among more of them and after changes: some searches of "
        "pipelines take another one",
    ),
    (
        "*analytic*",
        "an estimate of a process holds 1.9 GiB, so that this search has 1.943 GiB of memory in place of 1.043",
    ),
    (
        "p*",
        "probes say which of them are stepped in turns, and a plan says which of its layers' times have a standard "
        "error of more than a fifth: the list of probes, and one plan with such a profile, whose numbers are the same",
    ),
    (
        "[pu]*",
        "a chunk's gradients count from its first backward pass on: memory of interleaved plans with as many "
        "micro-batches as stages is lower, of others a workspace at most; no plan differs; seven outputs",
    ),
    (
        "[pu]*",
        "an output of an interleaved stage does not count once the next stage has received it: memory of interleaved "
        "plans is lower by 0.6 to 2.1 %; no plan differs; nine outputs",
    ),
    (
        "printed/*",
        "tables are 120 columns wide where there is no terminal: headings are broken between words, and a table of "
        "many columns is printed as several; the files that they show are as they were",
    ),
    (
        "simulated/*.svg",
        "colours and sizes are attributes, and a style sheet only for dark pages; times are in the trace",
    ),
    ("simulated/*.svg", "one drawing module with another style sheet; the times it draws are in the trace beside it"),
)
"""Outputs that were frozen again since the first time (`freeze PATTERN`), and why that is no change of a result."""


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
    if name.endswith(".h5"):
        return "".join(sorted(text.splitlines(keepends=True)))
    if not name.endswith(".json"):
        return text
    parts = {key: given.left_out(value) for key, value in json.loads(text).items()}
    return json.dumps(parts, indent=1, sort_keys=True) + "\n"


def tables(path: Path) -> str:
    """A profile as text: a line for each attribute and column, without what is only said of them.

    Numbers have 10 digits, and what is below 1e-12 is 0: another order of summation is no difference. (Plans and
    predictions have all digits.)
    """
    lines = []
    with h5py.File(path) as file:
        said = ("notes", "versions", "version", "date")
        lines += [f"{name}: {value}" for name, value in file.attrs.items() if name not in said]
        file.visititems(lambda name, held: lines.append(f"{name}: {_values(held)}") if hasattr(held, "dtype") else None)
    return "\n".join(lines) + "\n"


def _values(column: h5py.Dataset) -> list[Any]:
    values = column[()]
    if values.dtype.kind == "S":
        return np.char.decode(values).tolist()
    # A little more than the value: decimals of few digits are not on the edge between two roundings then.
    return [0 if abs(value) < 1e-12 else float(f"{value * (1 + 3e-12):.10g}") for value in values.tolist()]


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
