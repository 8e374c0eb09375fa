"""Results of the GPU kit: those that are kept are held to today's predictions, and how others would be adopted."""

import json
import tarfile
from pathlib import Path
from statistics import median

import pytest

from shardwright.devices.table import read_devices
from shardwright.io import BadInput
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import read_profiles

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def profiles(gpu_kit, tmp_path_factory):
    """Profiles of a rehearsal, from shapes."""
    folder = tmp_path_factory.mktemp("profiles")
    gpu_kit("prepare").write_profiles(_setting(gpu_kit), folder)
    return folder / "hardware.h5", folder / "llama-3-8b.h5"


def _setting(gpu_kit):
    return gpu_kit("setting").setting_of_rehearsal(Path("work"), Path("carried"))


@pytest.fixture
def came_back(gpu_kit, profiles, tmp_path):
    """A folder as it comes back: every plan takes 1.1 times as long as was predicted of it."""
    priced = read_profiles((profiles[0],), (profiles[1],))
    rows = {}
    for name, case in gpu_kit("plans").of_one_device(_setting(gpu_kit)).items():
        if case.is_profiled:
            estimate = evaluate(case.plan, priced, cost_model_of(case.plan, priced), timeline=False).estimate
            found = {"s": estimate.simulated_step_time_s, "bytes": estimate.memory_bytes}
            rows[name] = {f"profiled_{what}": value for what, value in found.items()}
            rows[name] |= {f"measured_{what}": 1.1 * value for what, value in found.items()}
    whole = _setting(gpu_kit).identity() | {"date": "2026-01-31"}
    steps = {"S0": {"versions": {"memory_bytes": _setting(gpu_kit).memory_bytes}}, "S4": rows}
    steps["S2"] = {"product: large, 4096 rows": {"random_flops_per_s": 500e12, "flops": 2e12}, "odd": {"error": "?"}}
    whole["steps"] = {name: {"rows": each} for name, each in steps.items()}
    folder = tmp_path / "came-back"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(whole))
    (folder / "report.md").write_text("# Report\n")
    with tarfile.open(folder / "everything.tgz", "w:gz") as packed:
        for file in profiles:
            packed.add(file, f"./kit/profiles/{file.name}")
    return folder


def test_predictions_of_what_was_measured_on_gpus_are_no_worse_than_on_that_day(gpu_kit):
    adopt = gpu_kit("adopt")
    for file in (ROOT / "benchmarks" / "results").glob("gpu-*.json"):
        whole = adopt.read_results(file)
        reference = ROOT / "config" / "reference" / gpu_kit("setting").slug_of(whole)
        assert adopt.worse_predictions(whole, reference) == [], file.name


def test_adopted_results_are_held_to_predictions_from_the_adopted_profile(gpu_kit, came_back, tmp_path, monkeypatch):
    adopt, into = gpu_kit("adopt"), tmp_path / "repository"
    written = adopt.adopt(came_back, into)
    results, reference = into / "benchmarks" / "results", into / "config" / "reference" / "rehearsal-on-cpu"
    assert [path.relative_to(into).as_posix() for path in written] == [
        "benchmarks/results/gpu-rehearsal-on-cpu-2026-01-31.json",
        "benchmarks/results/gpu-rehearsal-on-cpu-2026-01-31.md",
        "config/reference/rehearsal-on-cpu/hardware.h5",
        "config/reference/rehearsal-on-cpu/llama-3-8b.h5",
    ]
    whole = adopt.read_results(results / "gpu-rehearsal-on-cpu-2026-01-31.json")
    assert adopt.worse_predictions(whole, reference) == []

    def slower(*arguments, **more):
        found = evaluate(*arguments, **more)
        estimate = found.estimate
        time_s = 0.8 * estimate.simulated_step_time_s
        return found._replace(
            estimate=type("E", (), {"simulated_step_time_s": time_s, "memory_bytes": estimate.memory_bytes})
        )

    monkeypatch.setattr(adopt, "evaluate", slower)
    worse = adopt.worse_predictions(whole, reference)
    assert len(worse) == sum(row.get("profiled_s") is not None for row in whole["steps"]["S4"]["rows"].values())
    assert all(": s: error 0.273, 0.091 when it was measured" in line for line in worse)


def test_a_rehearsal_is_not_adopted_into_the_repository(gpu_kit, came_back):
    with pytest.raises(BadInput, match="is of a rehearsal on cpu"):
        gpu_kit("adopt").adopt(came_back, ROOT)


@pytest.mark.parametrize("name", ["results.json", "everything.tgz"])
def test_what_is_missing_or_damaged_is_named_and_nothing_is_written(gpu_kit, came_back, tmp_path, name):
    (came_back / name).unlink()
    with pytest.raises(BadInput, match=name):
        gpu_kit("adopt").adopt(came_back, tmp_path / "repository")
    (came_back / name).write_bytes(b"noise")
    with pytest.raises(BadInput, match=name):
        gpu_kit("adopt").adopt(came_back, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_noisy_profile_of_a_gpu_is_refused(gpu_kit, came_back, tmp_path, monkeypatch):
    adopt = gpu_kit("adopt")
    monkeypatch.setattr(adopt, "_errors", lambda row: iter([0.3]))
    adopt.adopt(came_back, tmp_path / "rehearsed")
    whole = adopt.read_results(came_back / "results.json") | {"what": "measured"}
    (came_back / "results.json").write_text(json.dumps(whole))
    with pytest.raises(BadInput, match=r"llama-3-8b.h5: the error of .* is above its bound"):
        adopt.adopt(came_back, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_change_of_the_table_is_proposed_and_not_made(gpu_kit, came_back):
    adopt = gpu_kit("adopt")
    whole = adopt.read_results(came_back / "results.json") | {"what": "measured", "device": "NVIDIA H200"}
    before = (ROOT / adopt._TABLE).read_bytes()
    said = list(adopt.proposals(whole))
    (new,) = (line for line in said if line.startswith("+best_product = "))
    peak = read_devices().devices["H200"].peaks["bfloat16"]
    assert new == f"+best_product = {500e12 / peak:.3f}"
    assert any(
        line.startswith('+best_product_source = "benchmarks/gpu_kit on one NVIDIA H200, 2026-01-31') for line in said
    )
    assert (ROOT / adopt._TABLE).read_bytes() == before
    assert "no change is proposed" in "\n".join(adopt.proposals(whole | {"what": "rehearsal on cpu"}))


def test_what_is_assumed_is_what_estimates_take(gpu_kit):
    found = gpu_kit("assumed").assumptions("NVIDIA H200", {})
    assumed = {one.name: one.assumed for one in found}
    assert len(found) == len(assumed) == 14 and all(one.measured is None for one in found)
    assert assumed["best product, of the peak"] == read_devices().devices["H200"].best_product
    assert 0 < median(assumed.values())
