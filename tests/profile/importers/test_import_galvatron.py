import pytest

from shardwright.types import SequenceParallel
from shardwright.types.model_profile import read_model_profile, write_model_profile
from shardwright_profile.importers.documents import FlatType
from shardwright_profile.importers.galvatron.model import import_galvatron

MIB = 1024**2
BATCHES = (1, 2, 4)
NONE, MEGATRON = SequenceParallel.NONE, SequenceParallel.MEGATRON


def layer_ms(batch):
    return 1 + 2 * batch


def rest_ms(batch):
    return 3 + batch


def test_a_layer_takes_the_difference_of_two_models_in_seconds_a_microbatch(request_for, rows_of):
    rows = rows_of(import_galvatron(request_for()))
    for batch in BATCHES:
        row = rows[("block", 1, "none", "none", batch)]
        assert row["forward_s"] == pytest.approx(layer_ms(batch) / 1000)
        assert row["forward_source"] == "measured"
        assert row["sequence_length"] == 32


def test_embedding_and_head_have_half_of_the_rest_each(request_for, rows_of):
    rows = rows_of(import_galvatron(request_for()))
    for name in ("embedding", "head"):
        row = rows[(name, 1, "none", "none", 4)]
        assert row["forward_s"] == pytest.approx(rest_ms(4) / 2 / 1000)
        assert row["activation_bytes"] == 4 * 10 * MIB
        assert (row["forward_source"], row["activation_source"]) == ("derived", "derived")


def test_backward_is_assumed_by_the_ratio_and_recomputation_adds_a_forward(request_for, rows_of):
    rows = rows_of(import_galvatron(request_for()))
    forward_s = layer_ms(2) / 1000
    plain, again = (rows[("block", 1, "none", recompute, 2)] for recompute in ("none", "full"))
    assert plain["backward_s"] == pytest.approx(2.5 * forward_s)
    assert again["backward_s"] == pytest.approx(3.5 * forward_s)
    assert again["forward_s"] == plain["forward_s"]
    assert plain["backward_source"] == again["backward_source"] == "assumed"


def test_memory_is_in_mib_a_sample_and_a_recomputed_layer_keeps_its_input(request_for, rows_of):
    rows = rows_of(import_galvatron(request_for()))
    plain, again = (rows[("block", 1, "none", recompute, 4)] for recompute in ("none", "full"))
    assert (plain["activation_bytes"], again["activation_bytes"]) == (40 * MIB, 4 * MIB)
    assert (plain["workspace_bytes"], plain["workspace_source"]) == (0, "absent")
    # Computed again, the layer holds for a moment what it holds otherwise.
    assert (again["workspace_bytes"], again["workspace_source"]) == (40 * MIB, "derived")


def test_parameter_size_is_of_a_whole_layer_and_other_states_are_four_times_the_parameters(
    request_for, hardware, states_of
):
    states = states_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, sequence_parallel=NONE)))
    for tp_size in (1, 2):
        block = states[("block", tp_size)]
        assert block["parameter_bytes"] == block["gradient_bytes"] == 8 * MIB // tp_size
        assert block["optimizer_bytes"] == 16 * MIB // tp_size
        assert (block["optimizer_s"], block["optimizer_source"]) == (0, "absent")
    assert states[("embedding", 1)]["parameter_bytes"] == 64 * MIB // 4 // 2
    assert states[("head", 2)]["parameter_bytes"] == 40 * MIB // 4 // 2


def test_what_the_files_do_not_say_is_absent(request_for, rows_of):
    profile = import_galvatron(request_for())
    assert profile.process["process_source"][0] == profile.process["step_overhead_source"][0] == b"absent"
    assert set(profile.states["reduction_source"]) == {b"absent"}
    without = rows_of(import_galvatron(request_for()._replace(memory=None)))
    assert without[("block", 1, "none", "none", 1)]["activation_source"] == "absent"


def test_tensor_parallel_times_are_assumed_and_hold_the_traffic(request_for, hardware, rows_of):
    rows = rows_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, sequence_parallel=NONE)))
    alone_s = layer_ms(4) / 1000 / 2
    # 2 regions, each one all-reduce forward and one backward; the replay leaves the last one out. 1 MB takes 1 s.
    message_s = 4 * 32 * 16 * 2 / 1e6
    plain, again = (rows[("block", 2, "none", recompute, 4)] for recompute in ("none", "full"))
    assert plain["forward_s"] == pytest.approx(alone_s + 2 * message_s)
    assert plain["backward_s"] == pytest.approx(2.5 * alone_s + 2 * message_s)
    assert again["backward_s"] == pytest.approx(3.5 * alone_s + 3 * message_s)
    assert plain["forward_source"] == plain["backward_source"] == "assumed"
    assert plain["activation_bytes"] == 4 * 6 * MIB


def test_megatron_splits_the_input_that_a_recomputed_layer_keeps(request_for, hardware, rows_of):
    rows = rows_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, sequence_parallel=MEGATRON)))
    whole = rows_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, sequence_parallel=NONE)))
    message_s = 4 * 32 * 16 * 2 / 1e6 / 2
    plain, again = (rows[("block", 2, "megatron", recompute, 4)] for recompute in ("none", "full"))
    # Each region gathers and scatters, forward and backward; the replay gathers twice and scatters once.
    assert plain["forward_s"] == pytest.approx(layer_ms(4) / 2000 + 4 * message_s)
    assert again["backward_s"] == pytest.approx(3.5 * layer_ms(4) / 2000 + 7 * message_s)
    assert again["activation_bytes"] == 4 * MIB // 2
    assert whole[("block", 2, "none", "full", 4)]["activation_bytes"] == 4 * MIB
    assert rows[("head", 2, "megatron", "none", 4)]["activation_bytes"] == 4 * 11 * MIB // 2


def test_what_galvatron_halved_in_place_of_measuring_is_assumed(request_for, hardware, memory_file, rows_of, states_of):
    only_one = {key: value for key, value in memory_file.items() if key != "1_2_1"}
    request = request_for(memory=only_one, tp_sizes=(1, 2), hardware=hardware, sequence_parallel=NONE)
    rows = rows_of(import_galvatron(request))
    assert rows[("block", 1, "none", "none", 1)]["activation_source"] == "derived"
    assert rows[("block", 2, "none", "none", 1)]["activation_source"] == "assumed"
    states = states_of(import_galvatron(request))
    assert [states[("head", tp_size)]["bytes_source"] for tp_size in (1, 2)] == ["derived", "assumed"]


def test_rows_without_memory_are_left_out_beyond_one_rank_and_named(request_for, hardware, memory_file, rows_of):
    del memory_file["other_memory_pp_off_sp"]["32"]["activation"]["2"]
    profile = import_galvatron(request_for(memory=memory_file, tp_sizes=(1, 2), hardware=hardware))
    assert ("block", 2, "megatron", "none", 1) in rows_of(profile)
    assert ("head", 2, "megatron", "none", 1) not in rows_of(profile)
    assert (
        "Left out at tp_size 2 with sequence_parallel megatron, recompute none, because their memory is in no table:"
        " embedding, head."
    ) in profile.provenance.notes


def test_micro_batches_that_were_not_measured_come_off_a_line(request_for, rows_of):
    rows = rows_of(import_galvatron(request_for(micro_batch_sizes=(1, 3, 8))))
    for size in (3, 8):
        row = rows[("block", 1, "none", "none", size)]
        assert row["forward_s"] == pytest.approx(layer_ms(size) / 1000)
        assert row["forward_source"] == "derived"
    assert rows[("block", 1, "none", "none", 1)]["forward_source"] == "measured"


def test_one_batch_grows_in_proportion(request_for, times_file, rows_of):
    times = {key: value for key, value in times_file.items() if "_bsz4_" in key}
    rows = rows_of(import_galvatron(request_for(times=times, micro_batch_sizes=(2,))))
    assert rows[("block", 1, "none", "none", 2)]["forward_s"] == pytest.approx(layer_ms(4) / 1000 / 2)


def test_raw_rows_are_taken_before_the_files_own_figures_and_stale_ones_are_named(request_for, memory_file, rows_of):
    older = {
        "layernum[6]_bsz2": 30.0,
        "layernum[12]_bsz2": 54.0,
        "layertype_0": 1.7,
        "layertype_0_bsz1": -3.0,
        "layernum[6]_bsz1": 20.0,
        "layernum[12]_bsz1": 32.0,
    }
    memory = {"layertype_0": memory_file["layertype_0"]["32"]}
    profile = import_galvatron(request_for(times=older, memory=memory))
    row = rows_of(profile)[("block", 1, "none", "none", 2)]
    assert row["forward_s"] == pytest.approx(0.004)
    assert row["activation_bytes"] == 20 * MIB
    assert "layertype_0 is 1.7 ms a sample" in profile.provenance.notes
    assert "layertype_0 at batch 1 is -3 ms a sample, which cannot be" in profile.provenance.notes


def test_of_several_pairs_of_rows_that_of_most_layers_counts(request_for, rows_of):
    times = {"layernum[2]_bsz1": 10.0, "layernum[4]_bsz1": 14.0, "layernum[6]_bsz1": 20.0, "layernum[12]_bsz1": 38.0}
    rows = rows_of(import_galvatron(request_for(times=times)))
    assert rows[("block", 1, "none", "none", 1)]["forward_s"] == pytest.approx(0.003)
    # The rest is what the fewest layers leave.
    assert rows[("head", 1, "none", "none", 1)]["forward_s"] == pytest.approx((10 - 2 * 2) / 2 / 1000)


def test_types_are_told_apart_in_the_models_order_and_each_sends_its_own_sizes(request_for, hardware, rows_of):
    types = (FlatType("encoder", 2, 32, 16, 8), FlatType("decoder", 2, 64, 32, 8))
    times = {"layernum[2,2]_bsz1_seq[32,64]": 20.0, "layernum[4,2]_bsz1_seq[32,64]": 24.0}
    times["layernum[2,4]_bsz1_seq[32,64]"] = 28.0
    entry = {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 6.0}}
    memory = {"layertype_0": {"32": entry}, "layertype_1": {"64": entry}}
    request = request_for(times=times, memory=memory, types=types, tp_sizes=(1, 2), hardware=hardware)
    rows = rows_of(import_galvatron(request))
    assert rows[("encoder", 1, "none", "none", 1)]["forward_s"] == pytest.approx(0.002)
    assert rows[("decoder", 1, "none", "none", 1)]["forward_s"] == pytest.approx(0.004)
    assert rows[("decoder", 2, "none", "none", 1)]["forward_s"] == pytest.approx(0.002 + 2 * 64 * 32 * 2 / 1e6)
    assert rows[("embedding", 1, "none", "none", 1)]["forward_s"] == pytest.approx((20 - 4 - 8) / 2000)


def test_memory_without_a_table_is_recomputed_from_the_raw_rows(request_for, memory_file, rows_of, states_of):
    profile = import_galvatron(request_for(memory={"1_1_2": memory_file["1_1_2"], "1_1_2_c": memory_file["1_1_2"]}))
    rows, states = rows_of(profile), states_of(profile)
    # 40 MiB a layer, and 8 samples on 2 GPUs.
    assert rows[("block", 1, "none", "none", 1)]["activation_bytes"] == 10 * MIB
    # 16 MiB of four parts a layer, sharded over 2.
    assert states[("block", 1)]["parameter_bytes"] == 8 * MIB
    assert "recomputed from the raw rows" in profile.provenance.notes


def test_raw_rows_under_tensor_parallelism_are_of_a_share_of_the_layer(request_for, memory_file, states_of):
    rows = memory_file["1_1_2"]
    states = states_of(import_galvatron(request_for(memory={"1_2_2": rows})))
    # 16 MiB of four parts a layer, on one of 4 GPUs.
    assert states[("block", 1)]["parameter_bytes"] == 16 * MIB


def test_a_table_that_is_not_what_its_raw_rows_give_is_named(request_for, memory_file):
    memory_file["layertype_0"]["32"]["tp_activation_per_bsz_dict"]["1"] = 11.0
    notes = import_galvatron(request_for(memory=memory_file, sequence_parallel=NONE)).provenance.notes
    assert "activation at tp 1 of type 0 is 11 MiB in the table and 10 MiB by the raw rows" in notes


def test_keys_of_another_grammar_are_named(request_for, times_file):
    notes = import_galvatron(request_for(times=times_file | {"layernum_7": 1.0})).provenance.notes
    assert "Unknown keys were ignored: layernum_7." in notes


def test_notes_stay_within_what_is_read_back(request_for, tmp_path, times_file):
    odd = {f"layertype_0_bsz1_seq32{' ' * 900}{i}\n": 1.0 for i in range(3000)}
    stale = {f"layertype_0_bsz{batch}_seq32": -1.0 for batch in range(5, 3000)}
    profile = import_galvatron(request_for(times=times_file | odd | stale))
    write_model_profile(tmp_path / "out.h5", profile)
    notes = read_model_profile(tmp_path / "out.h5").provenance.notes
    assert notes.splitlines()[-1].endswith("further notes are left out.")


def test_a_file_without_lengths_is_taken_at_the_models_and_says_so(request_for, times_file):
    older = {key.replace("_seq32", ""): value for key, value in times_file.items()}
    assert "does not state its sequence_length" in import_galvatron(request_for(times=older)).provenance.notes
    assert "does not state its sequence_length" not in import_galvatron(request_for()).provenance.notes


def test_a_negative_rest_is_absent_and_named(request_for, rows_of):
    times = {"layernum[2]_bsz1_seq32": 5.0, "layernum[4]_bsz1_seq32": 15.0}
    profile = import_galvatron(request_for(times=times))
    row = rows_of(profile)[("head", 1, "none", "none", 1)]
    assert (row["forward_s"], row["forward_source"], row["backward_source"]) == (0, "absent", "absent")
    assert "-5 ms left" in profile.provenance.notes


def test_only_measured_points_are_fitted(request_for):
    profile = import_galvatron(request_for(micro_batch_sizes=(16, 32)))
    assert profile.fits["points"].max() == len(BATCHES)


def test_mending_keeps_the_longest_run_of_rows_and_levels_what_falls(request_for, rows_of):
    times = {f"layernum[{n}]_bsz{b}_seq32": n * 2.0 * b + 1 for n in (2, 4) for b in (1, 2, 3, 4)}
    # As another, slower machine: rows that fall afterwards.
    times |= {"layernum[2]_bsz1_seq32": 50.0, "layernum[4]_bsz1_seq32": 70.0}
    profile = import_galvatron(request_for(times=times, repair=True))
    sizes = [size for *strategy, size in rows_of(profile) if strategy == ["block", 1, "none", "none"]]
    assert sizes == [2, 3, 4]
    assert "layernum[2] takes 50 ms at batch 1 and 9 ms at 2: only its batches 2 to 4 are used." in (
        profile.provenance.notes
    )
    noisy = {f"layernum[{n}]_bsz{b}_seq32": 20.0 * b + n * t for n in (2, 4) for b, t in ((1, 5), (2, 3), (3, 7))}
    levelled = rows_of(import_galvatron(request_for(times=noisy, repair=True)))
    found = [levelled[("block", 1, "none", "none", b)] for b in (1, 2, 3)]
    assert [row["forward_s"] for row in found] == pytest.approx([0.004, 0.004, 0.007])
    assert [row["forward_source"] for row in found] == ["derived", "derived", "measured"]


def test_the_profile_is_read_back_and_equal_input_gives_equal_bytes(request_for, hardware, tmp_path, rows_of):
    for name in ("a.h5", "b.h5"):
        profile = import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, micro_batch_sizes=(16,)))
        write_model_profile(tmp_path / name, profile)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert rows_of(read_model_profile(tmp_path / "a.h5")) == rows_of(profile)
