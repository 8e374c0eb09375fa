"""What a run sends to TensorBoard and W&B; one that fails is left out after one warning."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import BadInput, read_document
from shardwright.types import Evaluation, Prediction, StepMetrics
from shardwright_train.training import loggers as loggers_of
from shardwright_train.training.loggers import Loggers, RunNames, open_loggers, scalars

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
METRICS = StepMetrics(
    step=3,
    loss=2.5,
    step_time_s=0.5,
    tokens_per_s=1024.0,
    mfu=None,
    grad_norm=1.5,
    learning_rate=1e-3,
    peak_memory_bytes=(2**30, 3 * 2**30),
    time_utc="2026-01-01T00:00:00Z",
    evaluation=Evaluation(loss=2.0, perplexity=7.5, labels=10, samples=1, time_s=0.1),
)


@pytest.fixture
def prediction() -> Prediction:
    return read_document(EXAMPLES / "prediction.json", Prediction)


def names(folder: Path, first: int = 1) -> RunNames:
    return RunNames(folder, random_plan(tiny("llama"), 1, 2), "0123456789abcdef", first)


class Writer:
    """Stands for torch's SummaryWriter, which needs the package tensorboard; raises where no folder can be made."""

    def __init__(self, folder: str, purge_step: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.purge_step, self.unwritten, self.steps = purge_step, {}, {}
        writers.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.unwritten.setdefault(step, {})[name] = value

    def flush(self) -> None:
        self.steps, self.unwritten = self.steps | self.unwritten, {}

    def close(self) -> None:
        self.flush()


writers: list[Writer] = []


@pytest.fixture(autouse=True)
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    writers.clear()


def test_numbers_have_names_and_what_is_not_known_is_left_out(prediction: Prediction) -> None:
    found = scalars(METRICS, prediction)
    assert found["loss/validation"] == 2.0 and found["memory/peak_gib"] == 3.0 and "time/mfu" not in found
    assert found["time/predicted_step_s"] == prediction.estimate.simulated_step_time_s
    bare = scalars(msgspec.structs.replace(METRICS, evaluation=None), None)
    assert not [name for name in bare if "predicted" in name or "validation" in name]


def test_tensorboard_gets_every_step_at_once(tmp_path: Path, prediction: Prediction) -> None:
    loggers = open_loggers(("tensorboard",), names(tmp_path, first=3), prediction)
    loggers.write(METRICS)
    (writer,) = writers
    assert writer.purge_step == 3  # what an earlier process wrote of this step and later ones is shown no more
    assert writer.steps == {3: scalars(METRICS, prediction)}  # before it is closed: a killed run loses nothing


class Failing:
    faults = (OSError,)

    def __init__(self) -> None:
        self.asked = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.asked += 1
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_logger_that_fails_is_left_out_after_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers, failing = open_loggers(("tensorboard",), names(tmp_path), None), Failing()
    loggers.to = {"wandb": failing, **loggers.to}
    for _ in range(3):
        loggers.write(METRICS)
    loggers.close()
    told = capsys.readouterr().err
    assert failing.asked == 1 and told.count("\n") == 1
    assert told.startswith("warning: --log-to wandb: [Errno 28] No space left on device: nothing more is sent there")
    assert set(writers[0].steps) == {3}


def test_where_nothing_can_be_written_the_run_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(BadInput, match="tensorboard"):
        open_loggers(("tensorboard",), names(tmp_path), None)
    assert open_loggers(("none",), names(tmp_path), None) == Loggers(None)


def test_a_package_that_is_not_installed_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_of, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"--log-to wandb: wandb is not installed: pip install 'shardwright\[wandb\]'"):
        loggers_of.check_loggers(("wandb",))


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    loggers = open_loggers(("wandb",), names(tmp_path), None)
    loggers.write(METRICS)
    loggers.close()
    (found,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"loss/validation" in found.read_bytes()
