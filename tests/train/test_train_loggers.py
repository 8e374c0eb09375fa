"""What a run sends to TensorBoard, W&B and MLflow; one that fails is left out after one warning."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from random_plans import random_plan
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.layout_pb2 import Layout
from tiny_models import tiny

from shardwright_formats.io import BadInput, read_document
from shardwright_formats.types import Evaluation, Prediction, StepMetrics
from shardwright_train.training import loggers as loggers_of
from shardwright_train.training.loggers import Loggers, RunNames, open_loggers, scalars

EXAMPLES = Path(__file__).parents[2] / "formats" / "examples"
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


def events(folder: Path) -> Iterator[Any]:
    """The events of all files of a folder, in order, each with the checksums that TensorBoard holds it to."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            header, data, footer = content[8:12], content[12 : 12 + length], content[12 + length : 16 + length]
            for raw, told in ((content[:8], header), (data, footer)):
                found = crc32c(raw)
                assert ((((found >> 15) | (found << 17)) + 0xA282EAD8) & 0xFFFFFFFF) == struct.unpack("<I", told)[0]
            yield Event.FromString(data)
            content = content[16 + length :]


def test_numbers_have_names_and_what_is_not_known_is_left_out(prediction: Prediction) -> None:
    found = scalars(METRICS, prediction)
    assert found["loss/validation"] == 2.0 and found["memory/peak_gib"] == 3.0 and "time/mfu" not in found
    assert found["time/predicted_step_s"] == prediction.estimate.simulated_step_time_s
    bare = scalars(msgspec.structs.replace(METRICS, evaluation=None), None)
    assert not [name for name in bare if "predicted" in name or "validation" in name]


def test_tensorboard_gets_every_step_and_predictions_in_the_same_charts(tmp_path: Path, prediction: Prediction) -> None:
    loggers = open_loggers(("tensorboard",), names(tmp_path, first=3), prediction)
    loggers.write(METRICS)
    version, begun, charts, step = events(tmp_path / "tensorboard")  # before it is closed: a killed run loses nothing
    loggers.close()
    assert version.file_version == "brain.Event:2"
    assert (begun.step, begun.session_log.status) == (3, SessionLog.START)
    layout = Layout.FromString(charts.summary.value[0].tensor.string_val[0])
    together = [list(chart.multiline.tag) for chart in layout.category[0].chart]
    assert ["time/step_s", "time/predicted_step_s"] in together
    assert step.step == 3
    assert {value.tag: value.simple_value for value in step.summary.value} == pytest.approx(
        scalars(METRICS, prediction)
    )


def test_a_second_start_within_a_second_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        loggers = open_loggers(("tensorboard",), names(tmp_path), None)
        loggers.write(METRICS)
        loggers.close()
    assert sum(event.step == 3 for event in events(tmp_path / "tensorboard")) == 2


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
    assert sum(event.step == 3 for event in events(tmp_path / "tensorboard")) == 3


def test_where_nothing_can_be_written_the_run_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(BadInput, match="tensorboard"):
        open_loggers(("tensorboard",), names(tmp_path), None)
    assert open_loggers(("none",), names(tmp_path), None) == Loggers(None)


def test_a_package_that_is_not_installed_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_of, "find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=r"--log-to wandb: wandb is not installed: pip install 'shardwright-train\[wandb\]'"
    ):
        loggers_of.check_loggers(("wandb",))


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    loggers = open_loggers(("wandb",), names(tmp_path), None)
    loggers.write(METRICS)
    loggers.close()
    (found,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"loss/validation" in found.read_bytes()


def test_mlflow_works_without_a_server_and_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        loggers = open_loggers(("mlflow",), names(tmp_path), None)
        loggers.write(METRICS)
        loggers.close()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("shardwright").experiment_id])
    assert run.data.metrics["loss/validation"] == 2.0
    assert len(client.get_metric_history(run.info.run_id, "loss/train")) == 2
