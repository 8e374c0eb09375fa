"""The benchmark of published runs: what it refuses, how nanotron cuts layers, and what a table counts, by hand."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import DataParallel, Recompute, SequenceParallel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def public(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from accuracy_parts import public
    from accuracy_parts.public import pricing, report, runs, sets, show

    assert pricing and report and runs and sets and show
    return public


@pytest.mark.parametrize("given", [(), ("--reference", "nowhere")])
def test_without_the_published_runs_it_says_so_in_one_line(given):
    command = [sys.executable, str(ROOT / "benchmarks/accuracy.py"), "public", *given]
    called = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert called.returncode == 2 and called.stdout == ""
    assert called.stderr.count("\n") == 1 and called.stderr.startswith("error: "), called.stderr
    assert "give the folder" in called.stderr


def test_the_page_of_published_runs_is_written_from_their_figures(public):
    results = ROOT / "benchmarks/results"
    sets = json.loads((results / "accuracy-public.json").read_bytes())["sets"]
    page = public.show.page_text(sets)
    assert (results / "accuracy-public.md").read_text(encoding="utf-8") == page
    sets[0]["time"]["median"] *= 2
    assert public.show.page_text(sets) != page


def test_layers_are_cut_as_nanotron_cuts_them(public):
    # A layer has 4 + 3 x 4 products of its width squared, the head 64: four layers.
    number = {"hidden": 2048, "ffn": 8192, "vocab": 131072, "layers": 16}
    assert public.sets._cuts(number, 1) == (0, 16)
    # 20 layers' worth in two: the eleventh is the first to exceed ten.
    assert public.sets._cuts(number, 2) == (0, 11, 16)
    assert public.sets._cuts(number, 4) == (0, 6, 11, 16, 16)


def run_of(public, number, ran, measured_bytes=None):
    own = {"group": "one", "name": str(number), "measured_s": float(ran) if ran else None, "chunks": 1 + number}
    return nanotron_run(public, **own, measured_bytes=measured_bytes, failed=not ran)


def test_a_table_counts_errors_ranks_the_chosen_plan_and_what_fits(public):
    # Predicted to be the fastest is the third, which does not fit; then the first, which takes 2 s where 1 s is best.
    cases = [(2, 1.0, 50), (1, 1.1, 60), (4, 0.5, 120), (8, 6.0, 93), (10, 12.0, 80), (None, 1.0, 95), (None, 1.0, 10)]
    found = [
        public.pricing.Priced(run_of(public, i, ran, 100.0 if ran else None), time_s, size, size, 100)
        for i, (ran, time_s, size) in enumerate(cases)
    ]
    table = public.report.tables(found)
    assert table["time"] == pytest.approx(
        {"runs": 5, "median": 0.25, "mean": (0.5 + 0.1 + 0.875 + 0.25 + 0.2) / 5, "worst": 0.875, "bias": -0.25}
    )
    assert table["memory"]["median"] == pytest.approx(0.2)
    (group,) = table["groups"]
    assert group["chosen_over_best"] == group["chosen_of_others"] == 2.0 and group["contradicted"] == 0
    # Ranks predicted 2, 3, 1, 4, 5; measured 2, 1, 3, 4, 5: 1 - 6 x (0 + 4 + 4) / (5 x 24).
    assert group["rank_correlation"] == pytest.approx(0.6)
    assert table["fits"] == {
        "ran, predicted over": 1, "ran, predicted near the limit": 1, "ran, predicted to fit": 3,
        "failed, predicted over": 0, "failed, predicted near the limit": 1, "failed, predicted to fit": 1,
    }  # fmt: skip


_TITAN = {
    "model": "llama3.1-8b", "gpu": "H100-96GB", "gpus": 8, "fsdp": 8, "tp": 1, "pp": 1, "cp": 1, "local_batch": 1,
    "seq_len": 8192, "activation_checkpointing": "full", "torch_compile": 0, "precision": "bf16", "async_tp": 0,
    "peak_memory_gib": "", "step_time_s": 1.5,
}  # fmt: skip
_FOUNDRY = {
    "model": "mpt-1b", "layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50368, "seq_len": 2048,
    "gpus": 8, "gpu": "h100_80gb", "precision": "amp_bf16", "sharding": "FULL_SHARD",
    "activation_checkpointing": "False", "activation_cpu_offload": "False", "micro_batch": 4, "grad_acc": 1,
    "step_time_s": 0.4,
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that writes rows as a set of published runs."""

    def write(*rows):
        with (tmp_path / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path

    return write


def test_torchtitan_s_models_are_priced_by_their_own_shapes(public, folder_of):
    small, large = public.sets.torchtitan(folder_of(_TITAN, _TITAN | {"model": "llama3.1-70b", "gpus": 64, "fsdp": 64}))
    priced = list(public.pricing.priced([small, large], public.pricing.Factors()))
    by_name = {one.run.name: one for one in priced}
    times_s = [by_name[run.name].time_s for run in (small, large)]
    assert 7 < times_s[1] / times_s[0] < 12, "80 layers of twice the width, one sample a device"
    with pytest.raises(BadInput, match=r"model 'llama9' is not known: use llama3.1-8b, llama3.1-70b, llama3.1-405b"):
        public.sets.torchtitan(folder_of(_TITAN | {"model": "llama9"}))


def test_runs_that_no_uniform_plan_says_are_left_out(public, folder_of):
    rows = ({"pp": 8}, {"cp": 2}, {"async_tp": 1}, {"precision": "float8"}, {"gpu": "H200"})
    assert public.sets.torchtitan(folder_of(*(_TITAN | row for row in rows))) == []
    assert public.sets.llm_foundry(folder_of(_FOUNDRY | {"precision": "amp_fp8"})) == []


def test_llm_foundry_s_h100_are_priced_and_a_gpu_that_is_not_known_is_one_line(public, folder_of):
    a100, h100 = public.sets.llm_foundry(folder_of(_FOUNDRY | {"gpu": "a100_80gb"}, _FOUNDRY))
    slower, faster = public.pricing.priced([a100, h100], public.pricing.Factors())
    assert slower.run == a100 and 1.3 < slower.time_s / faster.time_s < 3.2
    with pytest.raises(BadInput, match="gpu 'b200' is not known: use a100_40gb, a100_80gb, h100_80gb"):
        public.sets.llm_foundry(folder_of(_FOUNDRY | {"gpu": "b200"}))


def test_the_terms_are_taken_in_one_after_another(public, folder_of, capsys):
    run = public.sets.torchtitan(folder_of(_TITAN | {"gpus": 64, "fsdp": 64, "seq_len": 512}))[0]
    rows = public.report.told_by_term([run])
    assert [row["with"] for row in rows] == ["before", *(f"+ {term.name}" for term in public.report.TERMS)]
    biases = [row["bias"] for row in rows]
    # A short sample's blocks wait for the host; It has no rates of its own.
    assert biases[0] < biases[1] == biases[2]
    (today,) = public.pricing.priced([run], public.pricing.Factors())
    assert biases[-1] == today.time_error
    assert "torchtitan 8B\n    before " in capsys.readouterr().out


def test_a_run_is_contradicted_by_a_twin_of_other_data_parallelism_on_as_many_gpus_or_more(public):
    twin = nanotron_run(public, devices=32, num_microbatches=8, measured_s=1.0)
    slower, fewer = (
        twin._replace(measured_s=1.6, data_parallel=DataParallel.ZERO2),
        twin._replace(devices=16, num_microbatches=16),
    )
    more, other = twin._replace(devices=64, num_microbatches=4), twin._replace(micro_batch_size=2, measured_s=9.0)
    assert public.report.contradicted([twin, slower, more, other]) == [slower]
    # More ranks lose more: that they took longer than fewer says nothing.
    assert public.report.contradicted([more, fewer]) == []
    assert public.report.contradicted([twin._replace(measured_s=0.3), fewer]) == [fewer]
    found = [
        public.pricing.Priced(run._replace(name=str(i)), time_s, 1, 1, 2)
        for i, (run, time_s) in enumerate([(slower, 0.5), (twin, 1.0), (other, 9.0), (other, 9.1), (other, 9.2)])
    ]
    (group,) = public.report.tables(found)["groups"]
    assert (group["chosen_over_best"], group["contradicted"], group["chosen_of_others"]) == (1.6, 1, 1.0)


def test_times_that_are_far_off_have_a_cause_where_other_runs_or_the_network_explain_them(public):
    """Half as many GPUs took less, as did smaller micro-batches: but for repeats' spread, and a pipeline's waits."""
    run = nanotron_run(public, devices=32, micro_batch_size=4, num_microbatches=4, measured_s=4.0, pp_size=4, tp_size=1)
    halved = run._replace(devices=16, num_microbatches=8)
    smaller = run._replace(micro_batch_size=2, num_microbatches=8)

    def cause(far, *others, time_s=1.0):
        found = [public.pricing.Priced(each, each.measured_s, 1, 1, 2) for each in others]
        return list(public.report.far_off([public.pricing.Priced(far, time_s, 1, 1, 2), *found]))

    others = ["took longer than on half as many GPUs, or than with smaller micro-batches"]
    assert cause(run, halved._replace(measured_s=3.1)) == others
    assert cause(run, halved._replace(measured_s=3.3)) == ["not explained by other runs"]
    # Of 4 micro-batches in 4 stages a step waits three sevenths, of 8 three elevenths.
    allowed_s = 4.0 / 1.25 * (1 + 3 / 8) / (1 + 3 / 4)
    assert cause(run, smaller._replace(measured_s=allowed_s - 0.01)) == others
    assert cause(run, smaller._replace(measured_s=allowed_s + 0.01)) == ["not explained by other runs"]
    assert cause(run, smaller._replace(measured_s=1.0, recompute=Recompute.FULL)) == ["not explained by other runs"]
    assert cause(run, run._replace(measured_s=2.0, data_parallel=DataParallel.ZERO2)) == [
        "took over 1.5 times the GPU time of a twin"
    ]
    assert cause(run._replace(tp_size=16, pp_size=1)) == ["tensor parallelism over nodes"]
    assert cause(run, time_s=2.5) == []


_PLAYBOOK = {
    "model": "1B", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072,
    "tied_embeddings": 1, "seq_len": 4096, "gpus": 16, "dp": 16, "tp": 1, "pp": 1, "zero_stage": 1, "micro_batch": 1,
    "grad_acc": 16, "global_batch": 256, "status": "ok", "step_time_s": 2.0, "peak_memory_gb": 30, "flags": "",
}  # fmt: skip


def test_the_playbook_s_network_is_told_apart_into_a_step_and_rates(public, folder_of):
    folder, sent = folder_of(_PLAYBOOK), 256e6
    rows = ""
    for name, rate, ways in (("AllReduce", 400e9, 2), ("AllGather", 200e9, 1), ("ReduceScatter", 100e9, 1)):
        for nodes in (1, 2, 4, 16, 32):
            # Beyond the runs' 16 nodes the source shows another network.
            step_s, size = (250e-6 if nodes < 32 else 9e-3), 8 * nodes
            moved = ways * (size - 1) / size * sent
            time_s = 10e-6 + ways * ((size - nodes) * 3e-6 + (nodes - 1) * step_s) + moved / rate
            rows += f"{name},{nodes},{size},256,{moved / time_s / 1e9}\n"
    (folder / "collectives.csv").write_text(f"collective,nodes,gpus,message_mb,bandwidth_gb_s\n{rows}")
    (sharded,) = public.sets.playbook(folder)
    assert sharded.machine.step_us == pytest.approx(250)
    ((_, all_reduce),), others = sharded.machine.node_gbit_s, dict(sharded.machine.gbit_s_by_collective)
    assert all_reduce == pytest.approx(3200) and others["all_gather"][0][1] == pytest.approx(1600)
    assert others["reduce_scatter"][0][1] == pytest.approx(800)
    # ZeRO gathers and scatters: at the all-reduces' rate it would be faster, where computation hides nothing.
    sharded = sharded._replace(habits_left_out=("overlap",))
    equal = sharded._replace(machine=sharded.machine._replace(gbit_s_by_collective=()))
    slower, faster = (next(public.pricing.priced([run], public.pricing.Factors())) for run in (sharded, equal))
    assert slower.time_s > 1.01 * faster.time_s


def nanotron_run(public, **changes):
    """Return a run of one nanotron plan on 16 GPUs, whose eight blocks are cut in two."""
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32768, "max_position_embeddings": 4096,
    }  # fmt: skip
    plain = public.runs.Run(
        set="s", group="g", name="n", config=tuple(config.items()), sequence_length=4096,
        machine=public.runs.Machine("H100-SXM", ((4, 3200.0),)), devices=16, tp_size=8, pp_size=2,
        data_parallel=DataParallel.DDP, micro_batch_size=1, num_microbatches=16, recompute=Recompute.NONE,
        runtime="nanotron", sequence_parallel=SequenceParallel.MEGATRON,
    )  # fmt: skip
    return plain._replace(**changes)


def priced_run(public, **changes):
    (priced,) = public.pricing.priced([nanotron_run(public, **changes)], public.pricing.Factors())
    return priced


def test_nanotron_s_pipelines_between_nodes_have_a_floor_by_tensor_parallelism(public, monkeypatch):
    floor_s = public.pricing.RUNTIMES["nanotron"].pipelined_block_ms[8] / 1e3
    between, larger = priced_run(public), priced_run(public, micro_batch_size=2, num_microbatches=16)
    # Of four blocks on each stage, 16 micro-batches and one of the other stage's.
    assert between.time_s == pytest.approx(17 * 4 * floor_s, rel=0.05)
    assert larger.time_s == pytest.approx(between.time_s, rel=0.05), "whatever the micro-batch"
    inside, flat = priced_run(public, devices=8, tp_size=4), priced_run(public, pp_size=1)
    alone = priced_run(public, tp_size=1)
    without = replace(public.pricing.RUNTIMES["nanotron"], pipelined_block_ms={})
    monkeypatch.setitem(public.pricing.RUNTIMES, "nanotron", without)
    assert priced_run(public).time_s < between.time_s / 2
    again = [priced_run(public, devices=8, tp_size=4), priced_run(public, pp_size=1), priced_run(public, tp_size=1)]
    assert [one.time_s for one in again] == [inside.time_s, flat.time_s, alone.time_s], "no floor there"


def test_nanotron_holds_gathered_inputs_where_they_fit(public, monkeypatch):
    size = 4096 * 2048 * 2
    cases = {
        "flat": {"pp_size": 1, "devices": 8},
        "two stages": {},
        "first of four": {"pp_size": 4, "devices": 32, "num_microbatches": 8},
        "alone": {"tp_size": 1},
    }
    held = {name: priced_run(public, **case).memory_bytes for name, case in cases.items()}
    tight = public.runs.Machine("H100-SXM", ((4, 3200.0),), memory_bytes=2**30)
    small = priced_run(public, machine=tight)
    known = public.pricing.RUNTIMES["nanotron"]
    without = replace(known, held=replace(known.held, gathered_inputs=False))
    monkeypatch.setitem(public.pricing.RUNTIMES, "nanotron", without)
    more = {name: held[name] - priced_run(public, **case).memory_bytes for name, case in cases.items()}
    assert more["flat"] == 2 * 8 * size * 7 // 8, "beyond the rank's own eighth"
    assert more["first of four"] == 2 * 2 * 2 * size * 7 // 8, "two blocks of two of four micro-batches"
    assert more["alone"] == more["two stages"] == 0
    assert small.memory_bytes == priced_run(public, machine=tight).memory_bytes, "the allocator takes them back"


def test_a_step_between_nodes_is_the_network_s_whatever_sends_over_it(public):
    cases = {"tp": {"tp_size": 16, "pp_size": 1}, "dp": {"tp_size": 1, "pp_size": 1, "habits_left_out": ("overlap",)}}
    slow = public.runs.Machine("H100-SXM", ((4, 3200.0),), step_us=300)
    plain = slow._replace(step_us=None)
    more = {
        name: priced_run(public, machine=slow, **case).time_s - priced_run(public, machine=plain, **case).time_s
        for name, case in cases.items()
    }
    # 16 micro-batches, in each of which eight blocks send eight messages over the border of two nodes, embedding, head
    # and loss some more; or one all_reduce of each of ten layers, there and back.
    assert 16 * 8 * 8 * 286e-6 < more["tp"] < 1.5 * 16 * 8 * 8 * 286e-6
    assert more["dp"] == pytest.approx(10 * 2 * 286e-6, rel=0.05)


def test_memory_that_was_read_on_the_first_rank_is_that_of_the_first_stage(public):
    # One micro-batch: the last of two stages has the head, its logits and as many samples in flight.
    first, fullest = (priced_run(public, num_microbatches=1, read_on_first=read) for read in (True, False))
    assert first.read_bytes < fullest.read_bytes == fullest.memory_bytes == first.memory_bytes, "what fits is the same"
