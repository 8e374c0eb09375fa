"""Every family is profiled: its real layers, measured on two ranks of this machine, become a readable profile."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forked_command import forked_command
from tiny_models import CONFIGS, tiny

from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.io import BadInput, read_document, write_document
from shardwright_formats.types import Measurement, Plans, Recompute, SequenceParallel
from shardwright_formats.types.model_profile import ModelProfile, read_model_profile
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import make_probes
from shardwright_profile.show import draw_profile

FAMILIES = ("llama", "gpt2", "bert", "t5", "vit", "swin", "qwen3_moe", "modernbert", "whisper", "llava")
SETTINGS = ProfileSettings(
    tp_sizes=(1,),
    sequence_parallel=(SequenceParallel.NONE,),
    recompute=(Recompute.NONE,),
    # So far apart that the larger one takes longer on a busy machine, too.
    micro_batch_sizes=(1, 32),
    layers=(1, 5),
)

pytestmark = pytest.mark.timeout(3200)


def _command(stage: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"from shardwright_{stage}.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def profiles(make_cluster: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelProfile]:
    """All families' probes, measured in one launch."""
    folder = tmp_path_factory.mktemp("families")
    files = []
    for family in FAMILIES:
        made = make_probes([tiny(family)], make_cluster((1, 2)), "cpu-2", SETTINGS)
        assert made.left_out == ()
        files.append(folder / f"{family}.json")
        write_document(files[-1], Plans(plans=made.plans))
    out = folder / "measurement.json"
    try:
        return _fitted(files, out, 3)
    except BadInput as error:
        # On a machine that is busy with other work: what the error says to do.
        assert "measure both with more --steps" in str(error)
        return _fitted(files, out, 20)


def _fitted(files: list[Path], out: Path, steps: int) -> dict[str, ModelProfile]:
    told = forked_command(["measure", *files, "--steps", steps, "--warmup-steps", 2, "--out", out])
    _, err = told.communicate(timeout=1500)
    assert told.returncode == 0, err
    measured = read_document(out, Measurement)
    return {
        family: fit_profile(
            [(out, msgspec.structs.replace(measured, plans=tuple(p for p in measured.plans if _of(p, family))))]
        )
        for family in FAMILIES
    }


def _of(measured: object, family: str) -> bool:
    return measured.plan.model.family == family  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_type_has_its_time_and_memory(profiles: dict[str, ModelProfile], family: str) -> None:
    model, profile = tiny(family), profiles[family]
    layers = profile.layers
    assert profile.origin.architecture_sha256 == model.architecture_sha256
    assert profile.provenance.versions.startswith("torch ")
    types = {"embedding", *model.layers, "head"}
    assert {name.decode() for name in layers["type"]} == types
    assert len(layers["type"]) == len(types) * 2, "two micro-batch sizes"
    assert (layers["forward_s"] > 0).all()
    for name in types:
        one, many = layers["activation_bytes"][layers["type"] == name.encode()]
        assert one < many <= 32 * one
    states = profile.states
    for row, name in enumerate(states["type"]):
        if name.decode() in model.layers:
            # float32: parameters as stored, by the shapes
            count = model.types[name.decode()].parameter_count()
            assert states["parameter_bytes"][row] == 4 * count


@pytest.mark.long
def test_t5_has_two_block_types(profiles: dict[str, ModelProfile]) -> None:
    assert {b"encoder", b"decoder"} <= set(profiles["t5"].layers["type"].tolist())


@pytest.mark.long
def test_a_profile_is_drawn_and_drawn_alike_again(profiles: dict[str, ModelProfile], tmp_path: Path) -> None:
    from shardwright_formats.types.model_profile import write_model_profile

    write_model_profile(tmp_path / "p.h5", profiles["t5"])
    for name in ("a.svg", "b.svg"):
        draw_profile(tmp_path / "p.h5", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text
    refused = _command("profile", "show", tmp_path / "p.h5", "--no-tables", "--picture", tmp_path / "p.txt")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {tmp_path}/p.txt: is no kind of picture: ")


@pytest.mark.long
def test_one_command_profiles_a_model_at_two_lengths(make_cluster: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    write_document(tmp_path / "cluster.json", make_cluster((1, 2)))  # type: ignore[arg-type]
    settings = msgspec.structs.replace(SETTINGS, micro_batch_sizes=(2, 4), sequence_lengths=(32,))
    write_document(tmp_path / "settings.json", settings)
    asked = (
        *("--name", "tiny", "--sequence-length", 16, "--cluster", tmp_path / "cluster.json", "--node-type", "cpu-2"),
        *("--settings", tmp_path / "settings.json", "--steps", 2, "--warmup-steps", 2, "--min-time-s", 0.1),
        *("--out", tmp_path / "profile.h5"),
    )
    told = _command("profile", "model", tmp_path / "model", *asked)
    assert told.returncode == 0, told.stderr
    layers = read_model_profile(tmp_path / "profile.h5").layers
    blocks = layers["type"] == b"block"
    points = np.stack([layers["sequence_length"][blocks], layers["micro_batch_size"][blocks]], 1)
    assert points.tolist() == [[16, 2], [32, 2], [16, 4]]
    assert not (tmp_path / "profile.h5.work").exists()


def test_what_the_train_stage_refuses_ends_the_one_command_in_its_one_line(
    make_cluster: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    write_document(tmp_path / "cluster.json", make_cluster((1, 2)))  # type: ignore[arg-type]
    write_document(tmp_path / "settings.json", SETTINGS)
    told = _command(
        "profile",
        *("model", tmp_path, "--name", "tiny", "--sequence-length", 16, "--cluster", tmp_path / "cluster.json"),
        *("--node-type", "cpu-2", "--settings", tmp_path / "settings.json", "--out", tmp_path / "profile.h5"),
    )
    assert told.returncode == 2
    assert [line for line in told.stderr.splitlines() if line.startswith("error: ")] == [told.stderr.splitlines()[-1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.json", "config.json", "settings.json"]
