"""Other systems themselves make the models that exports describe, and spread them as plans say.

Runs where torchtitan 0.2.2 and megatron-core 0.16.1 are installed (`make systems`).
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardwright.types import Plan
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.options import AdviseOptions
from shardwright_search.systems.megatron import megatron_arguments
from shardwright_search.systems.torchtitan import torchtitan_toml

pytestmark = pytest.mark.long
SCRIPTS = Path(__file__).parents[1]


def _printed(script: str, file: Path) -> int:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, file], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-600:]
    return int(done.stdout.split()[-1])


def _plan(model: str, gpus: str, choice: str, seq: int) -> Plan:
    question = question_of(AdviseOptions(model=model, gpus=gpus, batch=64, seq=seq, against=(choice,)))
    return reading_of(choice, question.setting).plan


def _of_first_stage(plan: Plan) -> int:
    """Numbers of all parameters of the first stage, on all its ranks together."""
    kinds = [plan.model.types[plan.model.layers[i]] for low, high in plan.stages[0].layers for i in range(low, high)]
    kinds.append(plan.model.types["embedding"])
    if len(plan.stages) == 1:
        kinds.append(plan.model.types["head"])
    return sum(kind.parameter_count() for kind in kinds)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is absent")
@pytest.mark.parametrize(
    ("model", "gpus", "choice", "seq"),
    [
        ("llama-3-8b", "1x8:H100-SXM", "zero=3,mbs=1", 4096),
        ("llama-3-8b", "2x8:H100-SXM", "tp=4,zero=3,mbs=1", 4096),
        ("llama-3-8b", "2x8:H100-SXM", "tp=2,pp=4,mbs=1,zero=2", 4096),
        ("llama-3-8b", "2x8:H100-SXM", "tp=2,pp=2,vpp=2,mbs=1,zero=2", 4096),
        ("llama-3-8b", "2x8:H100-SXM", "cp=2,zero=3,mbs=1,context=ring", 8192),
        ("qwen3-30b-a3b", "2x8:H100-SXM", "ep=8,zero=3,mbs=1,recompute=full", 4096),
        ("qwen3-30b-a3b", "2x8:H100-SXM", "tp=2,ep=4,etp=1,zero=3,mbs=1,recompute=full", 4096),
        ("deepseek-v2-lite", "2x8:H100-SXM", "tp=2,pp=2,ep=4,etp=1,mbs=1,zero=2,recompute=full", 4096),
        ("gpt-oss-20b", "2x8:H100-SXM", "ep=4,zero=3,mbs=1,recompute=full", 4096),
        ("llama-4-scout", "8x8:H100-SXM", "tp=8,ep=8,etp=1,zero=3,mbs=1,recompute=full", 4096),
    ],
)
def test_a_rank_of_torchtitan_has_its_share_of_the_first_stage(tmp_path, model, gpus, choice, seq):
    plan, file = _plan(model, gpus, choice, seq), tmp_path / "torchtitan.toml"
    file.write_text(torchtitan_toml(plan, Path("plan.json")).text)
    share = _of_first_stage(plan) / len(plan.stages[0].ranks)
    # Tensor parallelism leaves norms and routers whole, and rows that do not divide lie on the first ranks.
    assert share <= _printed("torchtitan_rank.py", file) < 1.02 * share


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is absent")
@pytest.mark.parametrize(
    "model",
    [
        *("llama-2-7b", "llama-3.2-1b", "mistral-7b", "gpt2-xl", "qwen2.5-7b", "qwen3-8b"),
        *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"),
    ],
)
def test_megatron_makes_the_model_that_is_described(tmp_path, model):
    plan, file = _plan(model, "8x8:H100-SXM", "zero=1,mbs=1", 1024), tmp_path / "args.txt"
    file.write_text(megatron_arguments(plan, Path("plan.json")).text)
    assert _printed("megatron_model.py", file) == plan.model.parameter_count
