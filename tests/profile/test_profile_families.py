"""Every family is profiled and planned: its layers, measured on two ranks, become a profile that a search reads."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forked_command import forked_command
from made_up import make_hardware
from tiny_models import CONFIGS, tiny

from shardwright.estimate.settings import ProfileSettings, misfit_of
from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Cluster, Measurement, Plans, Recompute, SequenceParallel, Strategy
from shardwright.types.model_profile import ModelProfile, read_model_profile
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import is_apart, make_probes
from shardwright_profile.show import draw_profile
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.request import SearchRequest

AT_TWO_SIZES = ("t5", "llama", "gpt2", "bert", "vit", "swin", "qwen3_moe", "modernbert", "whisper", "llava")
FAMILIES = (*AT_TWO_SIZES, *(name for name in CONFIGS if name not in AT_TWO_SIZES))
"""T5 comes first: whatever `--every` leaves out, tests of its profile have it."""
SETTINGS = ProfileSettings(
    tp_sizes=(1,),
    sequence_parallel=(SequenceParallel.NONE,),
    recompute=(Recompute.NONE,),
    # So far apart that the larger one takes longer on a busy machine, too.
    micro_batch_sizes=(1, 32),
    layers=(1, 5),
)

SIZE = 16
"""Samples of the only microbatch that the other families are measured with."""
pytestmark = pytest.mark.timeout(3200)


def _settings(family: str) -> ProfileSettings:
    """The settings of a family: of those at one size with a shared-out sequence, where their layers allow it."""
    if family in AT_TWO_SIZES:
        return SETTINGS
    # Of a profile with Ulysses, further probes are without: they tell parameters from what else there is.
    halves = {SequenceParallel.MEGATRON: (2,), SequenceParallel.ULYSSES: (1, 2)}
    fitting = (kind for kind in halves if misfit_of(tiny(family), _halved(kind)) is None)
    kind = next(fitting, SequenceParallel.NONE)
    sizes = halves.get(kind, (1,))
    return msgspec.structs.replace(SETTINGS, tp_sizes=sizes, sequence_parallel=(kind,), micro_batch_sizes=(SIZE,))


def _halved(kind: SequenceParallel) -> Strategy:
    return Strategy(tp_size=2, dp_size=1, sequence_parallel=kind)


def _command(stage: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"from shardwright_{stage}.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def profiles(
    make_cluster: Callable[..., object], tmp_path_factory: pytest.TempPathFactory, every: int
) -> dict[str, ModelProfile]:
    """The families' probes, measured in one launch; those that noise spoilt again, alone and for longer."""
    folder, families = tmp_path_factory.mktemp("families"), FAMILIES[::every]
    for family in families:
        made = make_probes([tiny(family)], make_cluster((1, 2)), "cpu-2", _settings(family))
        assert made.left_out == ()
        probes = Plans(plans=tuple(plan for plan in made.plans if not is_apart(plan)))
        write_document(folder / f"{family}.json", probes)
    fitted: dict[str, ModelProfile] = {}
    for attempt, steps in enumerate((3, 20, 60)):
        missing = [family for family in families if family not in fitted]
        if missing:
            fitted |= _measured(folder, missing, steps, folder / f"measurement-{attempt}.json")
    assert fitted.keys() == set(families)
    return fitted


def _measured(folder: Path, families: Sequence[str], steps: int, out: Path) -> dict[str, ModelProfile]:
    """The profiles of these families, measured in one launch, but for those whose probes were too noisy."""
    probes = [folder / f"{family}.json" for family in families]
    told = forked_command(["measure", *probes, "--steps", steps, "--warmup-steps", 2, "--out", out])
    _, err = told.communicate(timeout=1500)
    assert told.returncode == 0, err
    measured = read_document(out, Measurement)
    fitted = {}
    for family in families:
        plans = tuple(plan for plan in measured.plans if plan.plan.model.family == family)
        try:
            fitted[family] = fit_profile([(out, msgspec.structs.replace(measured, plans=plans))])
        except BadInput as error:
            # On a machine that is busy with other work: the caller does what the error says to do.
            assert "measure both with more --steps" in str(error)
    return fitted


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_type_has_its_time_and_memory(profiles: dict[str, ModelProfile], family: str) -> None:
    model, profile = tiny(family), profiles[family]
    layers = profile.layers
    assert profile.origin.architecture_sha256 == model.architecture_sha256
    assert profile.provenance.versions.startswith("torch ")
    types = {"embedding", *model.layers, "head"}
    assert {name.decode() for name in layers["type"]} == types
    settings = _settings(family)
    sizes = settings.micro_batch_sizes
    assert set(layers["micro_batch_size"].tolist()) == set(sizes)
    assert len(layers["type"]) == len(types) * len(sizes) * len(settings.strategies)
    assert (layers["forward_s"] > 0).all()
    for name in types:
        kept = layers["activation_bytes"][layers["type"] == name.encode()].tolist()
        assert len(sizes) == 1 or kept[0] < kept[1] <= 32 * kept[0]
    states = profile.states
    for row, name in enumerate(states["type"]):
        if name.decode() in model.layers:
            # float32: parameters as stored, by the shapes
            count = model.types[name.decode()].parameter_count(int(states["tp_size"][row]))
            assert states["parameter_bytes"][row] == 4 * count


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_search_plans_with_the_profile(
    profiles: dict[str, ModelProfile], make_cluster: Callable[..., Cluster], family: str
) -> None:
    cluster, settings, model = make_cluster((1, 2)), _settings(family), tiny(family)
    indexed = index_profiles(make_hardware(cluster), Path("h.h5"), profiles[family], Path("m.h5"))
    # Of a family at one size, what was measured alone: that size, of all ranks that share the sequence out.
    tp_size, several = max(settings.tp_sizes), family in AT_TWO_SIZES
    request = SearchRequest(
        name=family,
        global_batch_size=(2 // tp_size) * max(settings.micro_batch_sizes),
        num_microbatches=None if several else (1,),
        tp_sizes=(tp_size,),
        sequence_parallel=tuple(kind for size, kind in settings.strategies if size == tp_size),
        recompute=settings.recompute,
        pp_sizes=(1,),
    )
    answer = find_best(request, model, cluster, indexed, Path("search.json"), lambda _: None)
    assert isinstance(answer, SearchAnswer)
    assert answer.chosen.plan.model == model
    kinds = {kind for _, kind in settings.strategies}
    assert {layer.sequence_parallel for layer in answer.chosen.plan.layers} <= kinds


@pytest.mark.long
def test_t5_has_two_block_types(profiles: dict[str, ModelProfile]) -> None:
    assert {b"encoder", b"decoder"} <= set(profiles["t5"].layers["type"].tolist())


@pytest.mark.long
def test_a_profile_is_drawn_and_drawn_alike_again(profiles: dict[str, ModelProfile], tmp_path: Path) -> None:
    from shardwright.types.model_profile import write_model_profile

    write_model_profile(tmp_path / "p.h5", profiles["t5"])
    for name in ("a.svg", "b.svg"):
        draw_profile(tmp_path / "p.h5", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text
    refused = _command("profile", "show", tmp_path / "p.h5", "--no-tables", "--picture", tmp_path / "p.txt")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {tmp_path}/p.txt: is not a kind of picture: ")


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
