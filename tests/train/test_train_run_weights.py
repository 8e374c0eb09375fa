"""The commands: a run begins with a folder's weights, is not mixed up with another, and leaves a folder again."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forked_command import forked_command
from forked_ranks import run_worker
from random_plans import random_plan
from test_weights import published, tensors_of
from tiny_models import tiny
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from shardwright.io import BadInput, read_document, write_document
from shardwright.types import BestCheckpoint, RunResult
from shardwright_train.commands.documents import convert
from shardwright_train.commands.ranks import start_run
from shardwright_train.data.prepare import prepare
from shardwright_train.options import ConvertOptions, RunOptions, encode_job

MODEL = tiny("llama", vocab_size=260)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, a text, weights, and what a step of them left."""
    work = tmp_path_factory.mktemp("weights")
    (work / "text").mkdir()
    (work / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(work / "text"), "*.txt", 260, 1.0, work / "data")
    published(MODEL, work / "model", max_shard_size="50KB")
    (work / "model" / "tokenizer.json").write_bytes((work / "data" / "tokenizer.json").read_bytes())
    write_document(work / "plan.json", random_plan(MODEL, 3, 2, "float32"))
    status, error = run(work, "model")
    assert status == 0, error
    return work


def options_of(work: Path, weights: str, **more: Any) -> RunOptions:
    return RunOptions(
        plan=work / "plan.json",
        data=work / "data",
        steps=1,
        out=work / "out",
        checkpoints=work / "checkpoints",
        weights=work / weights,
        **more,
    )


def run(work: Path, weights: str) -> tuple[int, str]:
    files = ("--data", work / "data", "--checkpoints", work / "checkpoints", "--out", work / "out")
    asked = (work / "plan.json", *files, "--steps", "1", "--learning-rate", "0", "--weights", work / weights)
    command = forked_command(["run", *asked])
    error = command.communicate(120)[1]
    return command.wait(0), error


def converted(work: Path, out: str, copy_from: str = "model") -> Path:
    asked = {"checkpoint": work / "out" / "DONE.json", "plan": work / "plan.json", "copy_from": work / copy_from}
    convert(ConvertOptions(**asked, out=work / out, dtype="float32"))
    return work / out


def test_other_weights_are_another_run(work: Path) -> None:
    published(MODEL, work / "other")  # the same values in one file
    done = (work / "out" / "DONE.json").read_bytes()
    (work / "job.json").write_bytes(encode_job(options_of(work, "other", learning_rate=0.0)))
    with pytest.raises(AssertionError, match=r"BadInput: .* was saved under other initial weights"):
        run_worker("run_worker", [str(work / "job.json")], 2)
    assert (work / "out" / "DONE.json").read_bytes() == done


def test_what_a_run_left_opens_in_transformers(work: Path) -> None:
    """A step of learning rate 0 changes nothing."""
    found, wanted = tensors_of(converted(work, "exported")), tensors_of(work / "model")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], x) for key, x in wanted.items())
    LlamaForCausalLM.from_pretrained(work / "exported")
    assert len({file.stat().st_mode for file in (work / "exported").iterdir()}) == 1
    assert AutoTokenizer.from_pretrained(work / "exported")("the lazy dog")["input_ids"]
    with pytest.raises(BadInput, match="already exists"):
        converted(work, "exported")


@pytest.mark.parametrize(
    ("settings", "end"),
    [(None, 0), ({"eos_token": {"__type": "AddedToken", "content": "o"}}, "o"), ({"sep_token": "o"}, None)],
)
def test_the_token_that_ends_documents_ends_what_the_folder_generates(
    work: Path, tmp_path: Path, settings: dict[str, Any] | None, end: int | str | None
) -> None:
    """A tokenizer of `prepare` has no settings; without them a Llama ends at token 2, which is a byte here."""
    shutil.copyfile(work / "data" / "tokenizer.json", tmp_path / "tokenizer.json")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if isinstance(end, str):
        end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(end)
    out = converted(work, f"ends-{end}", str(tmp_path))
    tokenizer, model = AutoTokenizer.from_pretrained(out), LlamaForCausalLM.from_pretrained(out)
    assert tokenizer.eos_token_id == end
    assert model.config.eos_token_id == (2 if end is None else end)
    assert model.generation_config.eos_token_id == end


def test_a_tokenizer_with_code_is_not_copied_along(work: Path) -> None:
    (work / "hostile").mkdir()
    (work / "hostile" / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    before = sorted(work.rglob("*"))
    with pytest.raises(BadInput, match="auto_map names code"):
        converted(work, "copied", "hostile")
    assert sorted(work.rglob("*")) == before


def test_a_tokenizer_with_more_tokens_than_the_model_is_not_copied_along(work: Path) -> None:
    (work / "larger").mkdir()
    tokenizer = Tokenizer.from_file(str(work / "model" / "tokenizer.json"))
    tokenizer.add_tokens(["one too many"])
    tokenizer.save(str(work / "larger" / "tokenizer.json"))
    with pytest.raises(BadInput, match="has 261 tokens, but the model has 260"):
        converted(work, "copied", "larger")
    assert not (work / "copied").exists()


def test_a_damaged_checkpoint_and_one_of_another_model_are_not_written_out(work: Path) -> None:
    checkpoint = Path(read_document(work / "out" / "DONE.json", RunResult).checkpoint)
    write_document(work / "wider.json", random_plan(tiny("llama", vocab_size=261), 3, 2))
    with pytest.raises(BadInput, match="another model than the plan's"):
        convert(ConvertOptions(checkpoint=checkpoint, plan=work / "wider.json", out=work / "never"))
    damaged = work / "damaged"
    shutil.copytree(checkpoint, damaged)
    file = min(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(BadInput, match="its SHA-256 differs from the one that was saved"):
        convert(ConvertOptions(checkpoint=damaged, plan=work / "plan.json", out=work / "never"))
    assert not (work / "never").exists()


def test_the_best_checkpoint_is_written_out_where_it_is_asked_for(work: Path) -> None:
    done = read_document(work / "out" / "DONE.json", RunResult)
    asked = {"checkpoint": work / "best.json", "plan": work / "plan.json", "best": True}
    for checkpoint, what in (("best.json", "records no best checkpoint"), ("out", "needs a run, not")):
        write_document(work / "best.json", done)
        with pytest.raises(BadInput, match=what):
            convert(ConvertOptions(**asked | {"checkpoint": work / checkpoint}, out=work / "never"))
    best = BestCheckpoint(step=1, loss=1.0, checkpoint=done.checkpoint)
    write_document(work / "best.json", msgspec.structs.replace(done, best=best, checkpoint=str(work / "gone")))
    convert(ConvertOptions(**asked, out=work / "best"))
    found, wanted = tensors_of(work / "best"), tensors_of(work / "model")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], x) for key, x in wanted.items())
    with pytest.raises(BadInput, match="gone"):
        convert(ConvertOptions(**asked | {"best": False}, out=work / "never"))


def test_a_branch_takes_no_other_weights(work: Path) -> None:
    with pytest.raises(BadInput, match="leave out --weights or --resume-from"):
        start_run(options_of(work, "model", resume_from=work))


def test_weights_that_do_not_fit_end_a_run_before_anything_is_written(work: Path) -> None:
    published(tiny("llama", vocab_size=262), work / "wider")
    before = sorted(work.rglob("*"))
    with pytest.raises(BadInput, match="vocab_size is 262, but 260 in the plan's model"):
        start_run(options_of(work, "wider"))
    assert sorted(work.rglob("*")) == before
