"""Plans of 20 models on 3 clusters, written for every system as `advise --launch` writes them: `exports.py FOLDER`.

Of each model and cluster all choices are written that the system runs; a folder is FOLDER/SYSTEM/MODEL/CLUSTER/CHOICE,
and under FOLDER/tuned those of experts as `--tuned` runs them.
"""

import sys
from collections import Counter
from pathlib import Path

from shardwright.devices.table import read_devices
from shardwright.io import BadInput
from shardwright.types import FP8, Plan, Precision
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import machines_of, model_of
from shardwright_search.advise.targeted import started
from shardwright_search.options import AdviseOptions, System
from shardwright_search.systems.entry import Setting, has_experts
from shardwright_search.systems.registry import TUNED

MODELS = (
    *("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-7b", "llama-3-70b", "llama-3.1-405b", "mistral-7b"),
    *("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b", "gpt2-xl", "mixtral-8x7b"),
    *("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "llama-4-scout", "gpt-oss-20b"),
)
CLUSTERS = (("4x8:A100-80", "bfloat16"), ("8x8:H100-SXM", FP8), ("8x8:B200", FP8))
"""Nodes, and the precision of systems that have FP8; the others compute in bfloat16 there."""
CHOICES = (
    *("zero=3,mbs=1,recompute=full", "zero=2,mbs=2", "zero=1,mbs=1,recompute=mlp", "zero=0,mbs=1,sp=0"),
    *("tp=8,zero=1,mbs=1", "tp=4,zero=3,mbs=1", "tp=2,pp=4,zero=1,mbs=1,recompute=full", "pp=4,vpp=2,zero=1,mbs=1"),
    *("tp=2,cp=2,zero=3,mbs=1", "cp=4,zero=1,mbs=1,context=ring", "ep=8,zero=1,mbs=1", "ep=8,tp=2,etp=1,zero=3,mbs=1"),
)
"""Data, tensor, pipeline, context and expert parallelism, each kind of ZeRO and of recomputation."""
IN_FP8 = (System.MEGATRON, System.MEGATRON_BRIDGE, System.TORCHTITAN)
TUNED_FOLDER = "tuned"
RANKS = "ranks"
"""File with the number of ranks."""


def write_exports(folder: Path) -> Counter[System]:
    """Write what starts each choice in every system that runs it; return how many each runs."""
    table, written = read_devices(), Counter[System]()
    for name in MODELS:
        for gpus, precision in CLUSTERS:
            options = AdviseOptions(model=name, gpus=gpus, batch=512, seq=1024)
            model, cluster = model_of(options)[0], machines_of(options, table).cluster
            for system in System:
                compute = precision if system in IN_FP8 else "bfloat16"
                setting = Setting(model, cluster, 512, Precision(compute=compute))
                for choice in CHOICES:
                    place = folder / system / name / gpus.replace(":", "-") / choice
                    written[system] += _write(place, system, choice, setting)
                    if system in TUNED and has_experts(model):
                        _write(folder / TUNED_FOLDER / place.relative_to(folder), system, choice, setting, tuned=True)
    return written


def _write(place: Path, system: System, choice: str, setting: Setting, tuned: bool = False) -> bool:
    """Whether the system runs a choice: then its files are written."""
    try:
        plan: Plan = reading_of(choice, setting).plan
        files = started(system, plan, tuned).files
    except BadInput:
        return False
    place.mkdir(parents=True, exist_ok=True)
    for name, text in {RANKS: str(plan.world_size), **files}.items():
        (place / name).write_text(text)
    return True


if __name__ == "__main__":
    print(*(f"{system}: {count}" for system, count in write_exports(Path(sys.argv[1])).items()), sep=", ")
