"""Logits of some positions at a time: the same training, in the memory and the time that are predicted."""

from collections.abc import Callable

import pytest
from estimated_memory import CLUSTER, FLOAT32, MIXED, estimated_profiles, held_bytes
from msgspec import UNSET
from msgspec.structs import replace
from random_plans import random_plan
from run_parity import TOLERANCE
from tiny_models import tiny

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.plan.supported_fields import check_fields
from shardwright.types import Attention, DataParallel, LayerStrategy, PipelineStage, Plan, Precision, Schedule, Strategy
from shardwright_search.cost_model.plan import evaluate
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.models.support import check_supported

CONFIG = {
    "model_type": "llama", "vocab_size": 131072, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MODEL = model_of_config(CONFIG, "m", 2048, "config.json")
FAMILIES = {"llama": {}, "gemma2": {}, "bert": {}, "gpt2": {}, "vit": {}}


def _plans() -> list[Plan]:
    """Some families, one with caps of its logits, one with the head's matrix as its embedding, frozen or not."""
    models = [*map(tiny, FAMILIES), tiny("llama", tie_word_embeddings=True)]
    drawn = [random_plan(model, 70 + number, 2) for number, model in enumerate(models)]
    return [replace(plan, name=f"{plan.name} {plan.model.tied}", loss_chunks=2 + i % 3) for i, plan in enumerate(drawn)]


def test_chunks_of_positions_train_exactly_as_one_process(compare: Callable[..., dict[str, dict[str, float]]]) -> None:
    found = {name: max(errors.values()) for name, errors in compare(_plans()).items()}
    assert len(found) == len(_plans())
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def _plan(precision: Precision, tp_size: int, chunks: int, kind: DataParallel) -> Plan:
    layer = LayerStrategy(type="block", tp_size=tp_size, dp_size=4 // tp_size, data_parallel=kind)
    outer = Strategy(tp_size=tp_size, dp_size=4 // tp_size, data_parallel=kind)
    return Plan(
        name="p", model=MODEL, cluster=CLUSTER, global_batch_size=16, num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B, precision=precision, attention=Attention.SDPA,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 2),)),), embedding=outer, head=outer,
        layers=(layer, layer), loss_chunks=UNSET if chunks == 1 else chunks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "tp_size", "kind", "within"),
    [(FLOAT32, 1, DataParallel.DDP, 0.04), (MIXED, 2, DataParallel.ZERO3, 0.2)],
)
def test_memory_and_time_are_those_of_the_chunks(
    precision: Precision, tp_size: int, kind: DataParallel, within: float
) -> None:
    """Of sharded states the estimate has more, however many chunks there are; what chunks free is exact."""
    profiles, held, peaks, stepped = estimated_profiles(precision, (2, 4), MODEL), [], [], []
    for chunks in (1, 2, 8):
        plan = _plan(precision, tp_size, chunks, kind)
        held.append(held_bytes(plan, profiles))
        peaks.append(simulate_step(plan, 0, family_named("llama", "test"), "sdpa").peak_bytes)
        stepped.append(evaluate(plan, profiles).estimate.stages[0].time_s)
    assert held == pytest.approx(peaks, rel=within)
    assert held[1] - held[2] == pytest.approx(peaks[1] - peaks[2], rel=0.01)
    assert peaks[2] < 0.6 * peaks[0]
    assert stepped[0] < stepped[1] < stepped[2] < 1.4 * stepped[0]


def test_what_does_not_run_chunks_refuses_them_by_name() -> None:
    plan = replace(random_plan(tiny("llama"), 0, 2), loss_chunks=2)
    check_supported(plan, "plan.json")
    with pytest.raises(BadInput, match=r"loss_chunks: the fused cross_entropy has all logits at once"):
        check_supported(replace(plan, fused=("cross_entropy",)), "plan.json")
    with pytest.raises(BadInput, match=r"plan\.json: loss_chunks: the torchtitan export does not support it"):
        check_fields(plan, "plan.json", "the torchtitan export")
