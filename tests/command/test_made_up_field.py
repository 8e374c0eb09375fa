"""A field of a plan that no command supports is refused by each of them, and dropped by none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.plan.supported_fields import check_fields
from shardwright.types import DataParallel, GradientReduction, LayerStrategy, Plan
from shardwright_search.options import System, UniformRequest
from shardwright_search.uniform_plan import uniform_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "core/examples"
PROFILES = "--hardware", EXAMPLES / "hardware_profile.h5", "--profile", EXAMPLES / "model_profile.h5"
OTHERS = "evaluate", "explain", "check", "run", "measure"


CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "max_position_embeddings": 64,
}  # fmt: skip
REQUEST = UniformRequest(
    global_batch_size=8,
    num_microbatches=2,
    data_parallel=DataParallel.ZERO3,
    gradient_reduction=GradientReduction.EVERY_MICROBATCH,
    precision_compute="bfloat16",  # the one that Megatron Bridge takes
    ep_size=2,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan whose ranks shard experts, of a family that every system has."""
    cluster = read_document(EXAMPLES / "plan.json", Plan).cluster
    return uniform_plan("example", REQUEST, model_of_config(CONFIG, "qwen3_moe", 64, "config.json"), cluster)


def test_every_command_refuses_a_field_that_it_does_not_support_by_its_name(tmp_path: Path, plan: Plan) -> None:
    """Of layers, their experts, pipeline stages and plans; the types have them in a process of their own."""
    script = Path(__file__).with_name("made_up_field.py")
    write_document(tmp_path / "plain.json", plan)
    words = [sys.executable, script, tmp_path / "plain.json", tmp_path, *PROFILES]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"layers[1].experts.capacity", "layers[1].streamed", "shadow", "stages[0].priority"}
    for place, commands in found.items():
        assert set(commands) == {*(f"{verb} {system}" for verb in ("export", "launch") for system in System), *OTHERS}
        for name, (text, code) in commands.items():
            where = f"plan {plan.name}" if name in ("evaluate", "explain") else tmp_path / "changed.json"
            assert text.startswith(f"error: {where}: {place}: ") and text.count("\n") == 1, name
            assert text.endswith(" does not support it: remove it from the plan\n") and code == 2, name


def test_every_field_of_today_is_supported_and_one_of_tomorrow_at_its_default_too(plan: Plan) -> None:
    check_fields(plan, "plan.json", "test")

    class Tomorrow(LayerStrategy, frozen=True, kw_only=True, forbid_unknown_fields=True):
        streamed: bool = False

    fields = {name: getattr(plan.layers[0], name) for name in LayerStrategy.__struct_fields__}
    for streamed in (False, True):
        layers = (*plan.layers[:-1], Tomorrow(**fields, streamed=streamed))
        changed = replace(plan, layers=layers)
        if not streamed:
            check_fields(changed, "plan.json", "test")
            continue
        last = len(layers) - 1
        with pytest.raises(BadInput, match=rf"plan\.json: layers\[{last}\]\.streamed: test does not support it"):
            check_fields(changed, "plan.json", "test")
        check_fields(changed, "plan.json", "test", others={"layers.streamed"})
