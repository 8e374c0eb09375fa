"""Small files in Galvatron's grammar, made up so that every number can be had by hand."""

import json
from pathlib import Path

import pytest

from shardwright_formats.errors import BadInput
from shardwright_formats.files import read_document, write_document
from shardwright_formats.hardware_profile import Collective, CollectiveKey, write_hardware_profile
from shardwright_formats.model import Model
from shardwright_formats.model_profile import read_model_profile, write_model_profile
from shardwright_profile.importers.flat_model import FlatType, flat_model, parse_type
from shardwright_profile.importers.galvatron import GalvatronRequest, import_galvatron
from shardwright_profile.importers.galvatron_keys import read_computation, read_memory
from shardwright_profile.importers.hardware_points import hardware_profile, link_points
from shardwright_profile.importers.traffic import Hardware

MIB = 1024**2
BATCHES = (1, 2, 4)
TYPES = (FlatType("block", 4, 32, 16, 8),)


def layer_ms(batch):
    return 1 + 2 * batch


def rest_ms(batch):
    return 3 + batch


TIMES = {
    f"layernum[{layers}]_bsz{batch}_seq32": layers * layer_ms(batch) + rest_ms(batch)
    for layers in (2, 4)
    for batch in BATCHES
} | {f"layertype_0_bsz{batch}_seq32": layer_ms(batch) / batch for batch in BATCHES}

RAW = {f"layernum[{n}]_bsz8_seq32_rank0_{kind}": size for n, ms, act in ((1, 20, 50), (2, 36, 90))
       for kind, size in (("ms", ms), ("act", act), ("act_peak", 99))}  # fmt: skip
MEMORY = {
    "1_1_2": RAW,
    "1_2_1": RAW,
    "layertype_0": {
        "32": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 6.0, "4": 3.0, "checkpoint": 1.0}}
    },
    "layertype_0_sp": {
        "32": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 5.0, "checkpoint": 1.0}}
    },
    "other_memory_pp_off": {"32": {"model_states": {"1": 64.0, "2": 40.0}, "activation": {"1": 20.0, "2": 12.0}}},
    "other_memory_pp_off_sp": {"32": {"model_states": {"1": 64.0, "2": 32.0}, "activation": {"1": 20.0, "2": 11.0}}},
}


@pytest.fixture
def request_for(tmp_path):
    """What to import of files with this content; strings are written as they are."""

    def made(times=TIMES, memory=MEMORY, types=TYPES, **replaced):
        files = {"times.json": times, "memory.json": memory}
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        sizes = {kind.name: 8.0 * MIB for kind in types} | {"embedding": 8.0 * MIB, "head": 8.0 * MIB}
        fields = {
            "models": (flat_model("toy", "galvatron", types, sizes, {}),),
            "device": "A100",
            "backward_ratio": 2.5,
            "tp_sizes": (1,),
            "hardware": None,
            "micro_batch_sizes": (),
            "precision": "float32/bfloat16/float32",
            "attention": "auto",
            "mend": False,
        }
        return GalvatronRequest(
            computation=read_computation(tmp_path / "times.json"),
            memory=read_memory(tmp_path / "memory.json"),
            **(fields | replaced),
        )

    return made


@pytest.fixture
def hardware(tmp_path):
    """All-reduce among 2 at 1 MB/s as a whole; gather and scatter take half of it."""
    reduce = CollectiveKey(Collective.ALL_REDUCE, 2, True, False)
    points = list(link_points(reduce, 1e6, "derived"))
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        points += link_points(reduce._replace(collective=collective), 1e6, "derived")
    profile = hardware_profile("toys", "A100", [], points, None)
    write_hardware_profile(tmp_path / "hardware.h5", profile)
    return Hardware(tmp_path / "hardware.h5", profile)


def rows_of(profile):
    """By type, tp_size, sequence parallelism, recompute and micro-batch."""
    table = profile.layers
    names = ("type", "tp_size", "sequence_parallel", "recompute", "micro_batch_size")
    text = [[v.decode() if isinstance(v, bytes) else v for v in table[name].tolist()] for name in table]
    rows = [dict(zip(table, values, strict=True)) for values in zip(*text, strict=True)]
    return {tuple(row[name] for name in names): row for row in rows}


def states_of(profile):
    table = profile.states
    return {
        (name.decode(), int(tp_size)): {column: table[column][i] for column in table}
        for i, (name, tp_size) in enumerate(zip(table["type"], table["tp_size"], strict=True))
    }


def test_a_layer_takes_the_difference_of_two_models_in_seconds_a_microbatch(request_for):
    rows = rows_of(import_galvatron(request_for()))
    for batch in BATCHES:
        row = rows[("block", 1, "none", "none", batch)]
        assert row["forward_s"] == pytest.approx(layer_ms(batch) / 1000)
        assert row["forward_source"] == "measured"
        assert row["sequence_length"] == 32


def test_embedding_and_head_have_half_of_the_rest_each(request_for):
    rows = rows_of(import_galvatron(request_for()))
    for name in ("embedding", "head"):
        row = rows[(name, 1, "none", "none", 4)]
        assert row["forward_s"] == pytest.approx(rest_ms(4) / 2 / 1000)
        assert row["activation_bytes"] == 4 * 10 * MIB
        assert (row["forward_source"], row["activation_source"]) == ("derived", "derived")


def test_backward_is_assumed_by_the_ratio_and_recomputation_adds_a_forward(request_for):
    rows = rows_of(import_galvatron(request_for()))
    forward_s = layer_ms(2) / 1000
    plain, again = (rows[("block", 1, "none", recompute, 2)] for recompute in ("none", "full"))
    assert plain["backward_s"] == pytest.approx(2.5 * forward_s)
    assert again["backward_s"] == pytest.approx(3.5 * forward_s)
    assert again["forward_s"] == plain["forward_s"]
    assert plain["backward_source"] == again["backward_source"] == "assumed"


def test_memory_is_in_mib_a_sample_and_a_recomputed_layer_keeps_its_input(request_for):
    rows = rows_of(import_galvatron(request_for()))
    plain, again = (rows[("block", 1, "none", recompute, 4)] for recompute in ("none", "full"))
    assert (plain["activation_bytes"], again["activation_bytes"]) == (40 * MIB, 4 * MIB)
    assert (plain["transient_bytes"], plain["transient_source"]) == (0, "absent")
    # Computed again, the layer holds for a moment what it holds otherwise.
    assert (again["transient_bytes"], again["transient_source"]) == (40 * MIB, "derived")


def test_parameter_size_is_of_a_whole_layer_and_other_states_are_four_times_the_parameters(request_for, hardware):
    states = states_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware)))
    for tp_size in (1, 2):
        block = states[("block", tp_size)]
        assert block["parameter_bytes"] == block["gradient_bytes"] == 8 * MIB // tp_size
        assert block["optimizer_bytes"] == 16 * MIB // tp_size
        assert (block["optimizer_s"], block["optimizer_source"]) == (0, b"absent")
    assert states[("embedding", 1)]["parameter_bytes"] == 64 * MIB // 4 // 2
    assert states[("head", 2)]["parameter_bytes"] == 40 * MIB // 4 // 2


def test_what_the_files_do_not_say_is_absent(request_for):
    profile = import_galvatron(request_for())
    assert profile.process["process_source"][0] == profile.process["step_overhead_source"][0] == b"absent"
    assert set(profile.states["reduction_source"]) == {b"absent"}
    without = rows_of(import_galvatron(request_for()._replace(memory=None)))
    assert without[("block", 1, "none", "none", 1)]["activation_source"] == "absent"


def test_tensor_parallel_times_are_assumed_and_hold_the_traffic(request_for, hardware):
    rows = rows_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware)))
    alone_s = layer_ms(4) / 1000 / 2
    # 2 regions, each one all-reduce forward and one backward; the replay leaves the last one out. 1 MB takes 1 s.
    message_s = 4 * 32 * 16 * 2 / 1e6
    plain, again = (rows[("block", 2, "none", recompute, 4)] for recompute in ("none", "full"))
    assert plain["forward_s"] == pytest.approx(alone_s + 2 * message_s)
    assert plain["backward_s"] == pytest.approx(2.5 * alone_s + 2 * message_s)
    assert again["backward_s"] == pytest.approx(3.5 * alone_s + 3 * message_s)
    assert plain["forward_source"] == plain["backward_source"] == "assumed"
    assert plain["activation_bytes"] == 4 * 6 * MIB


def test_megatron_splits_the_input_that_a_recomputed_layer_keeps(request_for, hardware):
    rows = rows_of(import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware)))
    message_s = 4 * 32 * 16 * 2 / 1e6 / 2
    plain, again = (rows[("block", 2, "megatron", recompute, 4)] for recompute in ("none", "full"))
    # Each region gathers and scatters, forward and backward; the replay gathers twice and scatters once.
    assert plain["forward_s"] == pytest.approx(layer_ms(4) / 2000 + 4 * message_s)
    assert again["backward_s"] == pytest.approx(3.5 * layer_ms(4) / 2000 + 7 * message_s)
    assert again["activation_bytes"] == 4 * MIB // 2
    assert rows[("block", 2, "none", "full", 4)]["activation_bytes"] == 4 * MIB
    assert rows[("head", 2, "megatron", "none", 4)]["activation_bytes"] == 4 * 11 * MIB // 2


def test_what_galvatron_halved_in_place_of_measuring_is_assumed(request_for, hardware):
    only_one = {key: value for key, value in MEMORY.items() if key != "1_2_1"}
    rows = rows_of(import_galvatron(request_for(memory=only_one, tp_sizes=(1, 2), hardware=hardware)))
    assert rows[("block", 1, "none", "none", 1)]["activation_source"] == "derived"
    assert rows[("block", 2, "none", "none", 1)]["activation_source"] == "assumed"


def test_rows_without_memory_are_left_out_beyond_one_rank_and_named(request_for, hardware):
    alone = {key: value for key, value in MEMORY.items() if not key.endswith("_sp")}
    profile = import_galvatron(request_for(memory=alone, tp_sizes=(1, 2), hardware=hardware))
    assert ("block", 2, "megatron", "none", 1) not in rows_of(profile)
    assert "Left out at tp_size 2 with sequence_parallel megatron, recompute none" in profile.provenance.notes


def test_micro_batches_that_were_not_measured_come_off_a_line(request_for):
    rows = rows_of(import_galvatron(request_for(micro_batch_sizes=(1, 3, 8))))
    for size in (3, 8):
        row = rows[("block", 1, "none", "none", size)]
        assert row["forward_s"] == pytest.approx(layer_ms(size) / 1000)
        assert row["forward_source"] == "derived"
    assert rows[("block", 1, "none", "none", 1)]["forward_source"] == "measured"


def test_one_batch_grows_in_proportion(request_for):
    times = {key: value for key, value in TIMES.items() if "_bsz4_" in key}
    rows = rows_of(import_galvatron(request_for(times=times, micro_batch_sizes=(2,))))
    assert rows[("block", 1, "none", "none", 2)]["forward_s"] == pytest.approx(layer_ms(4) / 1000 / 2)


def test_raw_rows_are_taken_before_the_files_own_figures_and_stale_ones_are_named(request_for):
    older = {
        "layernum[6]_bsz2": 30.0,
        "layernum[12]_bsz2": 54.0,
        "layertype_0": 1.7,
        "layertype_0_bsz1": -3.0,
        "layernum[6]_bsz1": 20.0,
        "layernum[12]_bsz1": 32.0,
    }
    memory = {"layertype_0": MEMORY["layertype_0"]["32"]}
    profile = import_galvatron(request_for(times=older, memory=memory))
    row = rows_of(profile)[("block", 1, "none", "none", 2)]
    assert row["forward_s"] == pytest.approx(0.004)
    assert row["activation_bytes"] == 20 * MIB
    assert "layertype_0 is 1.7 ms a sample" in profile.provenance.notes
    assert "layertype_0 at batch 1 is -3 ms a sample, which cannot be" in profile.provenance.notes


def test_of_several_pairs_of_rows_that_of_most_layers_counts(request_for):
    times = {"layernum[2]_bsz1": 10.0, "layernum[4]_bsz1": 14.0, "layernum[6]_bsz1": 20.0, "layernum[12]_bsz1": 38.0}
    rows = rows_of(import_galvatron(request_for(times=times)))
    assert rows[("block", 1, "none", "none", 1)]["forward_s"] == pytest.approx(0.003)
    # The rest is what the fewest layers leave.
    assert rows[("head", 1, "none", "none", 1)]["forward_s"] == pytest.approx((10 - 2 * 2) / 2 / 1000)


def test_types_are_told_apart_in_the_models_order_and_each_sends_its_own_sizes(request_for, hardware):
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


def test_memory_without_a_table_is_recomputed_from_the_raw_rows(request_for):
    profile = import_galvatron(request_for(memory={"1_1_2": RAW, "1_1_2_c": RAW}))
    rows, states = rows_of(profile), states_of(profile)
    # 40 MiB a layer, and 8 samples on 2 GPUs.
    assert rows[("block", 1, "none", "none", 1)]["activation_bytes"] == 10 * MIB
    # 16 MiB of four parts a layer, sharded over 2.
    assert states[("block", 1)]["parameter_bytes"] == 8 * MIB
    assert "recomputed from the raw rows" in profile.provenance.notes


def test_a_table_that_is_not_what_its_raw_rows_give_is_named(request_for):
    odd = json.loads(json.dumps(MEMORY))
    odd["layertype_0"]["32"]["tp_activation_per_bsz_dict"]["1"] = 11.0
    notes = import_galvatron(request_for(memory=odd)).provenance.notes
    assert "activation at tp 1 of type 0 is 11 MiB in the table and 10 MiB by the raw rows" in notes


def test_keys_of_another_grammar_are_named(request_for):
    notes = import_galvatron(request_for(times=TIMES | {"layernum_7": 1.0})).provenance.notes
    assert "Keys that are not understood were passed over: layernum_7." in notes


def test_a_negative_rest_is_absent_and_named(request_for):
    times = {"layernum[2]_bsz1_seq32": 5.0, "layernum[4]_bsz1_seq32": 15.0}
    profile = import_galvatron(request_for(times=times))
    row = rows_of(profile)[("head", 1, "none", "none", 1)]
    assert (row["forward_s"], row["forward_source"], row["backward_source"]) == (0, "absent", "absent")
    assert "-5 ms left" in profile.provenance.notes


def test_only_measured_points_are_fitted(request_for):
    profile = import_galvatron(request_for(micro_batch_sizes=(16, 32)))
    assert profile.fits["points"].max() == len(BATCHES)


FALLING = TIMES | {"layernum[4]_bsz2_seq32": 14.9}
SHORT = {key: value for key, value in TIMES.items() if key != "layernum[4]_bsz2_seq32"}


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        ("{", "not valid JSON"),
        (json.dumps(TIMES)[:-9], "not valid JSON"),
        ("[]", "no object"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ({}, "holds no times of layers"),
        (json.dumps(TIMES | {"layernum[4]_bsz4_seq32": float("nan")}), "not a finite number"),
        (json.dumps(TIMES).replace("16}", "1e999}").replace(": 16,", ": 1e999,"), "finite"),
        (TIMES | {"layernum[4]_bsz4_seq32": -1.0}, "'layernum[4]_bsz4_seq32' is -1, not positive"),
        (TIMES | {"layernum[4]_bsz4_seq32": 0}, "not positive"),
        (TIMES | {"layernum[4]_bsz4_seq32": "9"}, "is '9', not a number"),
        (TIMES | {"layernum[4]_bsz4_seq32": True}, "is True, not a number"),
        (TIMES | {"layernum[4]_bsz4_seq32": 1e30}, "too large to be true"),
        (TIMES | {f"layernum[4]_bsz{'9' * 5000}_seq32": 1.0}, "declares a size of 99999"),
        (TIMES | {"layernum[4]_bsz0_seq32": 1.0}, "a batch of 0"),
        (TIMES | {f"layernum[{'1,' * 5000}1]_bsz1_seq32": 1.0}, "declares the list"),
        (TIMES | {"layernum[4,4]_bsz4_seq32": 1.0}, "differently many types"),
        ({"layernum[2]_bsz1_seq64": 1.0}, "no times at sequence_length 32, only at 64"),
        ({"layernum[2]_bsz1_seq32": 1.0}, "layernum[2] at batch 1 has no row of another number of layers"),
        ({"layertype_0_bsz1_seq32": 1.0}, "no times at sequence_length 32, only at none"),
        (SHORT, "layernum[2] at batch 2 has no row of another number of layers"),
        (FALLING, "takes 16 ms at batch 1 and 14.9 ms at 2"),
        (
            {"layernum[2]_bsz1_seq32": 9.0, "layernum[4]_bsz1_seq32": 8.0},
            "a layer of type 0 takes -0.5 ms at batch 1",
        ),
        (
            {f"layernum[{n}]_bsz{b}_seq32": ms for n, b, ms in ((2, 1, 5.0), (4, 1, 15.0), (2, 2, 9.0), (4, 2, 16.0))},
            "a layer of type 0 takes 5 ms at batch 1 and 3.5 ms at 2",
        ),
    ],
)
def test_impossible_times_are_one_clear_line(request_for, times, problem):
    with pytest.raises(BadInput) as caught:
        import_galvatron(request_for(times=times))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def _with(path, value):
    made = json.loads(json.dumps(MEMORY))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ({}, "holds no memory of layers"),
        (_with(("layertype_0", "32", "parameter_size"), -1), "not positive"),
        (_with(("layertype_0", "32", "tp_activation_per_bsz_dict", "1"), -1), "below 0"),
        (_with(("layertype_0", "32", "tp_activation_per_bsz_dict", "1"), "x"), "not a number"),
        (_with(("layertype_0", "32", "tp_activation_per_bsz_dict", "0"), 1), "where a tp_size is due"),
        (_with(("layertype_0", "32", "more"), 1), "has keys"),
        (_with(("layertype_0", "32"), 7), "not an object"),
        (_with(("layertype_0", "x"), {}), "declares"),
        (_with(("1_1_2",), 3), "not an object"),
        (_with(("1_1_2", "strange"), 3), "'strange' of '1_1_2' is unknown"),
        (_with(("1_1_2", "layernum[1]_bsz8_seq32_rank0_ms"), -3), "below 0"),
        (_with(("other_memory_pp_off", "32", "model_states"), {"1": None}), "not a number"),
    ],
)
def test_impossible_memory_is_one_clear_line(request_for, memory, problem):
    with pytest.raises(BadInput) as caught:
        import_galvatron(request_for(memory=memory))
    assert problem in str(caught.value)


def test_a_file_beyond_16_mib_is_not_read(tmp_path):
    with (tmp_path / "times.json").open("wb") as file:
        file.truncate(16 * MIB + 1)
    with pytest.raises(BadInput, match="larger than 16 MiB"):
        read_computation(tmp_path / "times.json")


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [
        ({"tp_sizes": (1, 2)}, "pass --hardware"),
        ({"types": (*TYPES, FlatType("other", 1, 32, 16, 8))}, "times of 1 types of layers"),
    ],
)
def test_what_does_not_belong_together_is_refused(request_for, replaced, problem):
    with pytest.raises(BadInput, match=problem):
        import_galvatron(request_for(**replaced))


def test_mending_keeps_the_longest_run_of_rows_and_levels_what_falls(request_for):
    times = {f"layernum[{n}]_bsz{b}_seq32": n * 2.0 * b + 1 for n in (2, 4) for b in (1, 2, 3, 4)}
    # As another, slower machine: rows that fall afterwards.
    times |= {"layernum[2]_bsz1_seq32": 50.0, "layernum[4]_bsz1_seq32": 70.0}
    profile = import_galvatron(request_for(times=times, mend=True))
    sizes = [key[4] for key in rows_of(profile) if key[:4] == ("block", 1, "none", "none")]
    assert sizes == [2, 3, 4]
    assert "layernum[2] takes 50 ms at batch 1 and 9 ms at 2: only its batches 2 to 4 are used." in (
        profile.provenance.notes
    )
    noisy = {f"layernum[{n}]_bsz{b}_seq32": 20.0 * b + n * t for n in (2, 4) for b, t in ((1, 5), (2, 3), (3, 7))}
    levelled = rows_of(import_galvatron(request_for(times=noisy, mend=True)))
    found = [levelled[("block", 1, "none", "none", b)] for b in (1, 2, 3)]
    assert [row["forward_s"] for row in found] == pytest.approx([0.004, 0.004, 0.007])
    assert [row["forward_source"] for row in found] == ["derived", "derived", "measured"]


def test_the_profile_is_read_back_and_equal_input_gives_equal_bytes(request_for, hardware, tmp_path):
    for name in ("a.h5", "b.h5"):
        profile = import_galvatron(request_for(tp_sizes=(1, 2), hardware=hardware, micro_batch_sizes=(16,)))
        write_model_profile(tmp_path / name, profile)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert rows_of(read_model_profile(tmp_path / "a.h5")) == rows_of(profile)


def _options(folder: Path, *more: str) -> tuple[str, ...]:
    files = ("--computation", str(folder / "times.json"), "--memory", str(folder / "memory.json"))
    return ("import", "galvatron", *files, "--device", "A100", "--backward-ratio", "2", *more)


def test_the_command_describes_a_model_that_no_family_does(command, tmp_path, request_for):
    request_for()
    out, described = tmp_path / "out.h5", tmp_path / "model.json"
    made = ("--type", "block,4,32,16,8", "--name", "flat", "--model-out", str(described), "--out", str(out))
    done = command(*_options(tmp_path, *made))
    assert done.returncode == 0, done.stderr
    model, profile = read_document(described, Model), read_model_profile(out)
    assert profile.origin.architecture_sha256 == model.architecture_sha256
    assert (profile.origin.model, model.layers, model.sequence_length) == ("flat", ("block",) * 4, 32)
    # 8 MiB of float32; embedding and head share the 64 MiB of states, 16 bytes a parameter.
    assert model.types["block"].parameter_count() == 2 * MIB
    assert model.types["head"].parameter_count() == 64 * MIB // 16 // 2
    assert "note: Backward is assumed to take 2 times forward" in done.stderr


def test_the_command_takes_the_families_own_description(command, tmp_path, request_for, make_model):
    request_for()
    write_document(tmp_path / "model.json", make_model())
    out = tmp_path / "out.h5"
    done = command(*_options(tmp_path, "--model", str(tmp_path / "model.json"), "--out", str(out)))
    assert done.returncode == 0, done.stderr
    assert read_model_profile(out).origin.architecture_sha256 == make_model().architecture_sha256


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ((), "either --model, or --type with --model-out"),
        (("--type", "block,4,32,16", "--model-out", "m.json"), "'block,4,32,16' is no type"),
        (("--type", "head,4,32,16,8", "--model-out", "m.json"), "is no type"),
        (("--type", "block,4,32,16,8", "--model-out", "m.json", "--tp-sizes", "1,x"), "no list of whole numbers"),
        (("--type", "block,4,32,16,8", "--model-out", "m.json", "--precision", "int8"), "'int8' is unknown"),
        (("--type", "block,4,32,16,8", "--model-out", "m.json", "--tp-sizes", "2"), "pass --hardware"),
    ],
)
def test_a_refused_command_says_why_in_one_line_and_writes_nothing(
    command, one_error_line, tmp_path, request_for, more, problem
):
    request_for()
    before = set(tmp_path.iterdir())
    done = command(*_options(tmp_path, *more, "--out", str(tmp_path / "out.h5")))
    assert problem in one_error_line(done, 2, tmp_path, before)


def test_a_ratio_must_be_given(command, tmp_path, request_for):
    request_for()
    options = [option for option in _options(tmp_path, "--out", "x.h5") if option not in ("--backward-ratio", "2")]
    done = command(*options)
    assert done.returncode == 2
    assert "--backward-ratio" in done.stderr


def test_a_type_is_parsed_strictly():
    assert parse_type("level1,2,3136,320,8") == FlatType("level1", 2, 3136, 320, 8)
    for odd in ("", "a", "a,1,2,3,0", "a,1,2,3,-4", "a b,1,2,3,4", "a,1,2,3,4,5", "a,1,2,3," + "9" * 5000):
        with pytest.raises(BadInput):
            parse_type(odd)
