"""Files that start a plan on SkyPilot (a task), Kubeflow (a TrainJob) and Kubernetes (a JobSet).

Fields are from SkyPilot's `sky/utils/schemas.py` (0.10 to 0.12), of Kubeflow Trainer's `v1alpha1/trainjob_types.go`
(2.0 to 2.2) and of JobSet's `v1alpha2/jobset_types.go` (0.8 to 0.10). The scripts of the folder travel in the arguments
of a pod: Kubernetes reads `$$` there as `$`, and `$(NAME)` as a variable, so each `$` is doubled.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple, TypeGuard

from shardwright.devices.table import shipped_devices
from shardwright.types import Plan

# Values as YAML that people read and edit: blocks, with every string quoted as in JSON or as a literal block.
#
# A text in double quotes of JSON means the same in YAML 1.1 and 1.2, except for characters beyond the printable ones,
# which are escaped here as YAML has it.


Yaml = str | int | bool | None | Sequence["Yaml"] | Mapping[str, "Yaml"]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML 1.1 does not read as strings."""


def yaml_text(value: Mapping[str, Yaml], *comments: str) -> str:
    """Return a document, below comments of one line each."""
    notes = (f"# {''.join(c if c.isprintable() else ' ' for c in comment)}" for comment in comments)
    return "\n".join((*notes, *_lines(value))) + "\n"


def _lines(value: Mapping[str, Yaml]) -> Iterator[str]:
    for key, each in value.items():
        is_plain = _PLAIN.fullmatch(key) and key.lower() not in _WORDS
        yield from _entry(f"{key if is_plain else _scalar(key)}:", each)


def _entry(lead: str, value: Yaml) -> Iterator[str]:
    if isinstance(value, str) and _is_block(value):
        yield f"{lead} |"
        yield from _indented(value[:-1].split("\n"))
    elif isinstance(value, Mapping) and value:
        yield lead
        yield from _indented(_lines(value))
    elif _is_list(value):
        yield lead
        yield from _items(value)
    else:
        yield f"{lead} {_scalar(value)}"


def _items(values: Sequence[Yaml]) -> Iterator[str]:
    """Yield the entries of a list; a nested entry's first line follows its dash."""
    for value in values:
        if (isinstance(value, Mapping) and value) or _is_list(value):
            first, *rest = _lines(value) if isinstance(value, Mapping) else _items(value)
            yield f"- {first}"
            yield from _indented(rest)
        else:
            yield from _entry("-", value)


def _is_list(value: Yaml) -> TypeGuard[Sequence[Yaml]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


def _is_block(text: str) -> bool:
    """Return whether a string can be a literal block: printable lines, the first of which is not indented."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and lines[0][:1] not in ("", " ")
        and all(line.isprintable() for line in lines)
    )


def _scalar(value: Yaml) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else _unicode_escape(ord(c)) for c in quoted)


def _unicode_escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# The files.


_LABEL = 40
"""Most characters of a name on Kubernetes: jobs and pods append some to it, up to a limit of 63."""
_SELECTOR = "nvidia.com/gpu.product"
"""The label that NVIDIA's GPU feature discovery gives a node: its device's name, a hyphen for each blank."""
_IMAGE = "<image>"
_MOST_CHARACTERS = 65536
"""The longest argument of a TrainJob."""


class NodesOfAType(NamedTuple):
    """Neighbouring nodes of one type, in the order of their ranks."""

    node_type: str
    first: int
    """Number of the first node."""
    nodes: int
    devices: int
    """Devices of each node."""


class Carried(NamedTuple):
    """Files that start a node, and variables that the user has to set, with their meanings."""

    files: Mapping[str, str]
    variables: Mapping[str, str]


class Places(NamedTuple):
    """Files by name, and for each file that is left out the reason, one line each."""

    files: dict[str, str]
    notes: tuple[str, ...]


def places_of(plan: Plan, groups: Sequence[NodesOfAType], carried: Carried, spot: bool = False) -> Places:
    """Return the files for SkyPilot, Kubeflow and Kubernetes, and the reason for each that cannot start the nodes."""
    written, notes = dict[str, str](), list[str]()
    if any(len(_escaped(text)) > _MOST_CHARACTERS for text in carried.files.values()):
        notes.append("no jobset.yaml and trainjob.yaml: a file of the folder is too long for an argument of a pod")
    else:
        written["jobset.yaml"] = _job_set(plan, groups, carried)
        written |= {"trainjob.yaml": _train_job(plan, groups[0], carried)} if len(groups) == 1 else {}
        notes.append(f"write an image in {' and '.join(written)}, in the place of {_IMAGE}")
    accelerator = _accelerator(plan, groups[0])
    if len(groups) > 1:
        notes.append("no skypilot.yaml and trainjob.yaml: nodes of several types are no task of SkyPilot or Kubeflow")
    elif accelerator is None:
        device = plan.cluster.node_types[groups[0].node_type].device
        notes.append(f"no skypilot.yaml: SkyPilot's name of {one_line(device)} is not known")
    else:
        written["skypilot.yaml"] = _sky_task(plan, groups[0], carried, accelerator, spot)
    return Places(written, tuple(notes))


def label_of(name: str) -> str:
    """Return a name in the form of a DNS label (RFC 1035), as Kubernetes and SkyPilot require."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LABEL].rstrip("-")
    return label if label[:1].isalpha() else f"plan-{label}".rstrip("-")


def _accelerator(plan: Plan, group: NodesOfAType) -> str | None:
    """Return SkyPilot's name of a node's devices; None if it is not known."""
    device = shipped_devices().get(plan.cluster.node_types[group.node_type].device)
    return None if device is None else device.skypilot


def _sky_task(plan: Plan, group: NodesOfAType, carried: Carried, accelerator: str, spot: bool) -> str:
    asked = " ".join(f"--env {name}=..." for name in carried.variables)
    price = ["spot: cheaper nodes, which may be taken away at any time"] if spot else []
    return yaml_text(
        {
            "name": label_of(plan.name),
            "num_nodes": group.nodes,
            "workdir": ".",
            "resources": {"accelerators": f"{accelerator}:{group.devices}", "use_spot": spot, "network_tier": "best"},
            # A variable without a value has to be given.
            "envs": dict.fromkeys(carried.variables) | {"ARGUMENTS": ""},
            "run": _script("skypilot.sh"),
        },
        f"In this folder: sky {'jobs ' if spot else ''}launch skypilot.yaml {asked}".rstrip(),
        *(f"{name}: {meaning}" for name, meaning in carried.variables.items()),
        "ARGUMENTS: further words of the command, between blanks; setup and image_id are yours",
        *price,
    )


def _train_job(plan: Plan, group: NodesOfAType, carried: Carried) -> str:
    command = _command(carried)
    return yaml_text(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": label_of(plan.name)},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {
                    "image": _IMAGE,
                    "numNodes": group.nodes,
                    "numProcPerNode": group.devices,
                    "resourcesPerNode": {"limits": {_resource(plan, group): group.devices}},
                    "env": _environment(carried, {}),
                    **command,
                },
            },
        },
        "kubectl create -f trainjob.yaml (Kubeflow Trainer 2; its runtime decides which nodes these are)",
        *_meanings(carried),
    )


def _job_set(plan: Plan, groups: Sequence[NodesOfAType], carried: Carried) -> str:
    name = label_of(plan.name)
    return yaml_text(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": f"nodes-{number}", "replicas": 1, "template": _job(plan, group, carried, name)}
                    for number, group in enumerate(groups)
                ],
            },
        },
        "kubectl create -f jobset.yaml",
        *_meanings(carried),
    )


def _job(plan: Plan, group: NodesOfAType, carried: Carried, name: str) -> Yaml:
    """Return the template of an indexed job with one pod for each node; ranks meet at the first pod."""
    place = {"FIRST_NODE": str(group.first), "MASTER_ADDR": f"{name}-nodes-0-0-0.{name}"}
    container: dict[str, Yaml] = {
        "name": "node",
        "image": _IMAGE,
        **_command(carried),
        "env": _environment(carried, place),
        "resources": {"limits": {_resource(plan, group): group.devices}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Yaml] = {
        "restartPolicy": "Never",
        **_selected(plan, group),
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "spec": {
            "parallelism": group.nodes,
            "completions": group.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
    }


def _selected(plan: Plan, group: NodesOfAType) -> dict[str, Yaml]:
    """Return a selector of nodes with the plan's devices; only for NVIDIA's devices."""
    if _is_amd(plan, group):
        return {}
    device = re.sub(r"[^A-Za-z0-9_.-]+", "-", plan.cluster.node_types[group.node_type].device)[:63].strip("-_.")
    return {"nodeSelector": {_SELECTOR: device}} if device else {}


def _is_amd(plan: Plan, group: NodesOfAType) -> bool:
    return plan.cluster.node_types[group.node_type].device.startswith("AMD ")


def _resource(plan: Plan, group: NodesOfAType) -> str:
    return "amd.com/gpu" if _is_amd(plan, group) else "nvidia.com/gpu"


def _command(carried: Carried) -> dict[str, Yaml]:
    """Return command and arguments of a container that writes its files and starts its node."""
    words = [word for pair in carried.files.items() for word in pair]
    return {
        "command": ["bash", "-c", _escaped(_script("pod.sh")), "pod"],
        "args": [*map(_escaped, words)],
    }


def _escaped(text: str) -> str:
    """Return a string with Kubernetes' variables escaped."""
    return text.replace("$", "$$")


def _environment(carried: Carried, place: Mapping[str, str]) -> Yaml:
    given = {**place, **{name: f"<{name}>" for name in carried.variables}, "ARGUMENTS": ""}
    return [{"name": name, "value": value} for name, value in given.items()]


def _meanings(carried: Carried) -> list[str]:
    lines = [f"{_IMAGE}: one with torch and what the plan is for"]
    lines += [f"<{name}>: {meaning}" for name, meaning in carried.variables.items()]
    return [*lines, "ARGUMENTS: further words of the command, between blanks"]


def one_line(text: str) -> str:
    """Return a string as one line of printable characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _script(name: str) -> str:
    return files(__package__).joinpath("scripts", name).read_text(encoding="utf-8")
