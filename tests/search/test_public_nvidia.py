"""NVIDIA's published runs in the benchmark: which rows are priced, as what plans, and how the others are counted."""

import csv
from pathlib import Path

import pytest

from shardwright.types import DataParallel

ROOT = Path(__file__).resolve().parents[2]
_GPT = {
    "model": "gpt3-175b", "precision": "BF16", "gpu": "H100", "num_gpus": 128, "seq_len": 2048, "layers": 96, "tp": 4,
    "pp": 8, "cp": 1, "ep": "", "etp": "", "dp": 4, "vp": 6, "mbs": 1, "gbs": 256, "recompute": "none", "step_s": 8.3,
    "note": "", "source": "NVIDIA-NeMo/Megatron-Bridge", "tag": "@0",
}  # fmt: skip


@pytest.fixture
def public(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from accuracy_parts import public
    from accuracy_parts.public import nvidia, pricing

    assert nvidia and pricing
    return public


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that writes changes of one row as the set."""

    def write(*changes):
        with (tmp_path / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, _GPT)
            writer.writeheader()
            writer.writerows(_GPT | change for change in changes)
        return tmp_path

    return write


def test_a_row_is_its_plan_and_rows_of_one_plan_count_once(public, folder_of):
    folder = folder_of({}, {"step_s": 8.5, "recompute": ""}, {"step_s": 9.0}, {"precision": "MXFP8", "vp": ""})
    same, narrow = public.nvidia.nvidia(folder)
    assert same.measured_s == 8.5 and public.nvidia.left_out(folder) == {
        "repeats of a plan, or of one in its release": 2
    }
    assert (same.tp_size, same.pp_size, same.dp_size, same.chunks, same.num_microbatches) == (4, 8, 4, 6, 64)
    assert (same.global_batch_size, same.data_parallel) == (256, DataParallel.ZERO2)
    assert (same.set, same.compute, same.reduce) == ("nvidia BF16", "bfloat16", "bfloat16")
    assert (narrow.set, narrow.compute, narrow.reduce, narrow.chunks) == ("nvidia FP8", "fp8", "bfloat16", 1)


def test_rows_that_no_plan_says_are_counted_by_their_first_cause(public, folder_of):
    cases = {
        "model nobody-1t": {"model": "nobody-1t", "ep": 8, "cp": 2},
        "precision FP16": {"precision": "FP16"},
        "recomputation of some layers alone": {"recompute": "full, 5 layers"},
        "activations of some layers on the host": {"note": "cpu offload layers 40"},
        "GPU V100": {"gpu": "V100"},
        "a slowdown that the source itself reports": {"note": "known slowdown in this release"},
        "chunks of unlike numbers of layers": {"vp": 5},
    }
    folder = folder_of(*cases.values(), *cases.values(), {})
    causes = public.nvidia.left_out(folder)
    assert causes == dict.fromkeys(cases, 2) | {"repeats of a plan, or of one in its release": 0}
    assert len(public.nvidia.nvidia(folder)) == 1


def test_chunks_of_the_405b_count_embedding_and_loss_as_layers(public, folder_of):
    """126 layers in 8 x 8 chunks of two, of which the first and the last have one."""
    row = {"model": "llama3-405b", "seq_len": 8192, "layers": 126, "tp": 4, "pp": 8, "vp": 8, "cp": 2, "gpu": "B200"}
    row |= {"precision": "MXFP8", "dp": 2, "gbs": 64, "num_gpus": 128}
    (run,) = public.nvidia.nvidia(folder_of(row))
    assert (run.set, run.cuts[:3], run.cuts[-3:], len(run.cuts)) == ("nvidia FP8 cp2", (0, 1, 3), (123, 125, 126), 65)
    (whole,) = public.nvidia.nvidia(folder_of({}))
    assert whole.cuts is None


def test_a_run_whose_ranks_share_positions_is_priced_as_a_ring(public, folder_of):
    """A published row of Llama 3 8B, whose two ranks hold half a sample each."""
    row = {"model": "llama3-8b", "seq_len": 8192, "layers": 32, "tp": 1, "pp": 1, "vp": "", "cp": 2}
    row |= {"num_gpus": 8, "dp": 4, "gbs": 128, "step_s": 12.78}
    (run,) = public.nvidia.nvidia(folder_of(row))
    assert (run.set, run.cp_size, run.dp_size, run.num_microbatches) == ("nvidia BF16 cp2", 2, 4, 32)
    (one,) = public.pricing.priced([run], public.pricing.Factors())
    assert abs(one.time_error) < 0.12
    (whole,) = public.pricing.priced([run._replace(cp_size=1, num_microbatches=16)], public.pricing.Factors())
    assert one.memory_bytes < whole.memory_bytes


def test_runs_with_experts_are_priced_with_their_grid(public, folder_of):
    """Published rows of Grok-1 (cut to 2 layers), of Qwen3 235B and of DeepSeek-V3, whose layers no stages divide."""
    row = {"model": "grok1-314b", "seq_len": 4096, "layers": 2, "num_gpus": 8, "tp": 4, "pp": 1, "vp": "", "ep": 2}
    grok = row | {"dp": 2, "gbs": 1024, "step_s": 24.0}
    row = {"gpu": "GB200", "seq_len": 4096, "num_gpus": 256, "tp": 1, "pp": 8, "mbs": 1, "ep": 32, "dp": 32}
    qwen = row | {"model": "qwen3-235b-a22b", "layers": 94, "vp": 3, "gbs": 8192, "step_s": 26.6623}
    deepseek = row | {"model": "deepseek-v3", "layers": 61, "pp": 4, "vp": 4, "ep": 64, "dp": 64, "gbs": 4096}
    deepseek |= {"recompute": "mla_up_proj", "step_s": 20.878}
    runs = public.nvidia.nvidia(folder_of(grok, qwen, deepseek))
    assert [run.set for run in runs] == ["nvidia BF16 Grok-1", "nvidia BF16 experts", "nvidia BF16 experts"]
    assert [(run.ep_size, run.etp_size) for run in runs] == [(2, 4), (32, 1), (64, 1)]
    assert runs[0].cuts is None and [run.cuts[-1] for run in runs[1:]] == [94, 62], (
        "with the layer of multi-token prediction"
    )
    assert len(runs[1].cuts) == 25 and runs[1].cuts[:3] == (0, 3, 7) and runs[1].cuts[-2] == 91
    found = {one.run.name.split()[0]: one for one in public.pricing.priced(runs, public.pricing.Factors())}
    for name, worst in (("grok1-314b", 0.2), ("qwen3-235b-a22b", 0.25), ("deepseek-v3", 0.15)):
        assert abs(found[name].time_error) < worst


def test_interleaved_runs_fit_and_take_about_what_was_measured(public, folder_of):
    """Two published rows of GPT-3 175B on 128 H100."""
    wide, narrow = public.pricing.priced(
        public.nvidia.nvidia(folder_of({"step_s": 8.309}, {"step_s": 8.91, "vp": 12})), public.pricing.Factors()
    )
    assert [one.run.chunks for one in (wide, narrow)] == [6, 12]
    for one in (wide, narrow):
        assert abs(one.time_error) < 0.15 and one.memory_bytes < one.limit_bytes


def test_each_habit_of_the_runtime_shortens_a_published_run(public, folder_of):
    (run,) = public.nvidia.nvidia(folder_of({}))
    habits = ("fused", "attention", "few_kernels", "message_pieces", "overlap")
    stated = [run._replace(habits_left_out=habits[taken:]) for taken in range(len(habits) + 1)]
    times_s = [one.time_s for run in stated for one in public.pricing.priced([run], public.pricing.Factors())]
    assert times_s == sorted(times_s, reverse=True) and times_s[-1] < 0.9 * times_s[0]


def test_layers_are_those_of_the_row_whatever_the_family(public, folder_of):
    """A cut Llama 3.1 405B has the layers of its row, not those of the whole model."""
    row = {"model": "llama3-405b", "seq_len": 8192, "tp": 4, "pp": 1, "vp": "", "num_gpus": 8, "dp": 2, "gbs": 64}
    (cut,), (gpt,) = public.nvidia.nvidia(folder_of(row | {"layers": 4})), public.nvidia.nvidia(folder_of({}))
    assert dict(cut.config)["num_hidden_layers"] == 4 and dict(gpt.config)["n_layer"] == 96


def test_releases_of_a_model_with_experts_are_scored_by_themselves_with_what_they_did(public, folder_of):
    row = {"model": "qwen3-30b-a3b", "precision": "MXFP8", "gpu": "GB300", "seq_len": 4096, "layers": 48, "tp": 1}
    row |= {"pp": 1, "vp": "", "ep": 8, "num_gpus": 8, "dp": 8, "mbs": 8, "gbs": 512}
    notes = {
        "container 25.09": {"dispatcher": "all-to-all", "overlaps_experts": False, "graphs": "none"},
        "container 26.02; dispatcher hybridep": {"dispatcher": "per-node", "graphs": "partial", "fused_experts": False},
        "container 26.06; dispatcher hybridep; EP all-to-all overlap on": {
            "overlaps_experts": True,
            "graphs": "partial",
        },
        "container 26.08": {"dispatcher": "per-node", "graphs": "full", "fused_experts": True, "fp8_attention": True},
    }
    runs = public.nvidia.nvidia(folder_of(*(row | {"note": note} for note in notes)))
    assert len(runs) == 4
    for run, habits in zip(runs, notes.values(), strict=True):
        assert habits.items() <= dict(run.habits).items()
    assert [run.set for run in runs] == ["nvidia FP8 experts"] * 2 + ["nvidia FP8 experts, 26.06 and later"] * 2
    older, _, _, newer = public.pricing.priced(runs, public.pricing.Factors())
    assert older.time_s > 1.3 * newer.time_s
