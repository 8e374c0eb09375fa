"""Prices of models of which a part is trained: what one plan takes and holds, by what its layers train."""

import json
from pathlib import Path

import pytest

from shardwright.io import BadInput
from shardwright_search.advise.question import Question, question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions

ADAPTER = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}


def _question(**trained: object) -> Question:
    return question_of(AdviseOptions(model="llama-3-8b", gpus="1x8:H100-SXM", batch=64, seq=2048, **trained))


def _priced(question: Question) -> tuple[float, int, int, int]:
    """Seconds of a step, and bytes of gradients, moments and activations on a rank of the one stage."""
    plan = question.setting.plan(question.setting.uniform("uniform", 1, 4, tp_size=2), "uniform")
    estimate = evaluate(plan, question.profiles).estimate
    terms = estimate.stages[0].memory_terms_bytes
    held = (terms.get(name, 0) for name in ("gradients", "optimizer", "activations"))
    return estimate.simulated_step_time_s, *held  # type: ignore[return-value]


def test_what_is_frozen_costs_no_states_and_less_time(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    whole = _priced(_question())
    half = _priced(_question(frozen=("embedding", "layers[0:16]")))
    behind = _priced(_question(frozen=("layers[16:32]",)))
    adapted = _priced(_question(lora=tmp_path))
    # Half the blocks have no backward pass, or the gradients of their inputs alone: 1/3 of 3 + 3, or 5/6 of it.
    assert half[0] / whole[0] == pytest.approx(4 / 6, rel=0.06)
    assert behind[0] / whole[0] == pytest.approx(5 / 6, rel=0.06)
    assert adapted[0] / whole[0] == pytest.approx(4 / 6, rel=0.12)
    assert half[1] < 0.6 * whole[1] and half[2] < 0.6 * whole[2] and half[3] < 0.6 * whole[3]
    assert behind[1:3] == pytest.approx(half[1:3], rel=0.15) and half[3] < behind[3] < whole[3]
    assert max(adapted[1:3]) < 0.005 * min(whole[1:3]) and adapted[3] < 0.9 * whole[3]


def test_what_cannot_be_trained_so_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | {"lora_dropout": 0.1}))
    with pytest.raises(BadInput, match=r"lora_dropout 0\.1 cannot be trained"):
        _question(lora=tmp_path)
    with pytest.raises(BadInput, match="'layer' names no part"):
        _question(frozen=("layer",))
