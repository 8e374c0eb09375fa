"""Programs that stand in for those of a cluster, and a plan for nodes of two types in an order of its own."""

import os
import shutil
import subprocess
from pathlib import Path

from made_up import make_mixed_cluster, make_model
from msgspec.structs import replace

from shardwright.types import PipelineStage, Plan
from shardwright_search.options import UniformRequest
from shardwright_search.uniform_plan import uniform_plan

SIZES = (1, 2, 3, 3, 3, 2)
"""Layers of each pipeline stage."""
LAYOUT = "Et*1|t*2|t*3|t*3|t*3|t*2L"
ARGUMENTS = ("--data-path", "a b", "--title", "$(exit 9)'*")
"""A user's own."""

PROGRAMS = {
    # A line for each node, in one write, for nodes start at once: its name and the arguments, between unit separators.
    "torchrun": """#!/bin/bash
        printf -v line '%s\\x1f' "${NODE_NAME:-${SLURMD_NODENAME:-}}" "${CUDA_DEVICE_MAX_CONNECTIONS-unset}" "$@"
        echo "$line" >>"$SAID"
    """,
    # The command once for each node of the groups that are asked for, last node first, as Slurm promises no order.
    "srun": """#!/bin/bash
        groups=0
        while [[ $1 == --* ]]; do
            [[ $1 != --het-group=* ]] || groups=$(seq "${1#--het-group=0-}" -1 0)$'\\n'0
            printf '%s\\n' "$1" >>"$SAID.srun"
            shift
        done
        for group in $(echo "$groups" | uniq); do
            list=SLURM_JOB_NODELIST_HET_GROUP_$group
            for node in $(scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}" | tac); do
                SLURMD_NODENAME=$node "$@" || exit
            done
        done
    """,
    "scontrol": """#!/bin/bash
        [[ "$1 $2" == "show hostnames" ]] || exit 1
        tr , '\\n' <<<"$3"
    """,
    # The command of the image in an environment of what --env names alone.
    "docker": """#!/bin/bash
        printf '%s\\n' "$@" >"$SAID.docker"
        variables=(PATH="$PATH" SAID="$SAID")
        shift
        while [[ $1 == --* ]]; do
            case $1 in
            --rm) shift ;;
            --env)
                if [[ $2 == *=* ]]; then variables+=("$2")
                elif [[ -v $2 ]]; then variables+=("$2=${!2}"); fi
                shift 2 ;;
            *) shift 2 ;;
            esac
        done
        shift
        exec env -i "${variables[@]}" "$@"
    """,
}


def mixed_plan(name: str = "two types", device_order: tuple[str, ...] = ("A100", "A10"), layers: int = 14) -> Plan:
    """Two nodes of 8 GPUs and two of 4, of which the pipeline takes the small ones first; layers are cut unevenly."""
    sizes = {"A100": (2, 8, 1 << 34), "A10": (2, 4, 1 << 34)}
    cluster = make_mixed_cluster(**{device: sizes[device] for device in device_order})
    request = UniformRequest(
        global_batch_size=32, num_microbatches=8, tp_size=2, pp_size=6, precision_compute="bfloat16"
    )
    first = {device: cluster.node_type_of_rank.index(device) for device in sizes}
    starts = [first["A10"] + 4 * i for i in range(2)] + [first["A100"] + 4 * i for i in range(4)]
    lows = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]
    stages = tuple(
        PipelineStage(ranks=tuple(range(start, start + 4)), layers=((low, high),))
        for start, low, high in zip(starts, lows[:-1], lows[1:], strict=True)
    )
    return replace(uniform_plan(name, request, make_model(layers), cluster), stages=stages)


def stand_ins(folder: Path) -> dict[str, str]:
    """An environment in which the programs are found, and nothing else of a cluster; what they are told is at SAID."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")
        (programs / name).chmod(0o755)
    for name in ("bash", "env", "cat", "dirname", "seq", "tr", "tac", "uniq"):
        if not (programs / name).exists():
            (programs / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(programs), "SAID": str(folder / "said"), "PRETRAIN": "/opt/Megatron LM/pretrain_gpt.py"}


def started(
    script: Path, environment: dict[str, str], *arguments: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """A script of the folder, run to its end."""
    command = ["bash", str(script), *arguments]
    return subprocess.run(
        command, env=environment, cwd=cwd or Path("/"), capture_output=True, text=True, timeout=300, check=False
    )


def said(environment: dict[str, str]) -> dict[int, list[str]]:
    """What each node's torchrun was told, by the rank of the node: its name, a variable, and the arguments."""
    lines = [line.split("\x1f")[:-1] for line in Path(environment["SAID"]).read_text().splitlines()]
    os.unlink(environment["SAID"])
    found = {int(line[line.index("--node_rank") + 1]): line for line in lines}
    assert len(found) == len(lines)
    return dict(sorted(found.items()))
