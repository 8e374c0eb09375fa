"""A memory file with two measurements, with and without sequence parallelism: an import takes one of them, whole."""

import pytest

from shardwright.io import BadInput, read_document
from shardwright.types import Model, SequenceParallel
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.importers.documents import FlatType
from shardwright_profile.importers.galvatron.model import import_galvatron

MIB = 1024**2
NONE, MEGATRON = SequenceParallel.NONE, SequenceParallel.MEGATRON


def layer(parameters, activations, checkpoint):
    dictionary = {str(tp_size): mib for tp_size, mib in activations.items()} | {"checkpoint": checkpoint}
    return {"parameter_size": parameters, "tp_activation_per_bsz_dict": dictionary}


def ends(states, activations):
    tables = {"model_states": states, "activation": activations}
    return {name: {str(tp_size): mib for tp_size, mib in table.items()} for name, table in tables.items()}


@pytest.fixture
def two_tables():
    """As in a published file of a 7B model, no figure of one rank is alike in both."""
    return {
        "layertype_0": {"32": layer(24.0, {1: 30.0, 2: 18.0}, 2.0)},
        "layertype_0_sp": {"32": layer(16.0, {1: 44.0, 2: 22.0}, 4.0)},
        "other_memory_pp_off": {"32": ends({1: 64.0, 2: 40.0}, {1: 20.0, 2: 12.0})},
        "other_memory_pp_off_sp": {"32": ends({1: 96.0, 2: 48.0}, {1: 28.0, 2: 14.0})},
    }


@pytest.fixture
def imported(request_for, hardware, two_tables):
    def made(sequence_parallel=None, memory=two_tables, **replaced):
        fields = {"tp_sizes": (1, 2), "hardware": hardware, "sequence_parallel": sequence_parallel}
        return import_galvatron(request_for(memory=memory, **(fields | replaced)))

    return made


FIGURES = {
    NONE: {"none": (30, 18), "full": (2, 2), "ends": (20, 12), "parameters": (24, 12), "ends' states": (64, 40)},
    MEGATRON: {"none": (44, 22), "full": (4, 2), "ends": (28, 14), "parameters": (16, 8), "ends' states": (96, 48)},
}
"""MiB at tp_size 1 and 2 by the tables of `two_tables`: of a layer kept and recomputed, of the ends together."""


@pytest.mark.parametrize("taken", [NONE, MEGATRON])
def test_memory_at_tp_size_1_is_of_the_table_that_larger_sizes_are_of(imported, rows_of, states_of, taken):
    profile, mib = imported(taken), FIGURES[taken]
    rows, states = rows_of(profile), states_of(profile)
    for tp_size, place, spelt in ((1, 0, "none"), (2, 1, taken.value)):
        for recompute in ("none", "full"):
            held = rows[("block", tp_size, spelt, recompute, 4)]
            assert held["activation_bytes"] == 4 * mib[recompute][place] * MIB
        assert rows[("block", tp_size, spelt, "full", 4)]["workspace_bytes"] == 4 * mib["none"][place] * MIB
        assert states[("block", tp_size)]["parameter_bytes"] == mib["parameters"][place] * MIB
        for name in ("embedding", "head"):
            assert rows[(name, tp_size, spelt, "none", 4)]["activation_bytes"] == 4 * mib["ends"][place] * MIB / 2
            assert states[(name, tp_size)]["parameter_bytes"] == mib["ends' states"][place] * MIB / 4 / 2


def test_nothing_is_of_the_table_that_was_not_taken(imported, rows_of):
    assert {(tp_size, split) for _, tp_size, split, *_ in rows_of(imported(NONE))} == {(1, "none"), (2, "none")}
    assert {(tp_size, split) for _, tp_size, split, *_ in rows_of(imported(MEGATRON))} == {(1, "none"), (2, "megatron")}


def test_tables_with_sequence_parallelism_are_taken_where_there_are_some(imported, rows_of, two_tables):
    assert rows_of(imported()) == rows_of(imported(MEGATRON))
    plain = {key: table for key, table in two_tables.items() if not key.endswith("_sp")}
    assert rows_of(imported(memory=plain)) == rows_of(imported(NONE))


def test_notes_say_which_table_was_taken_and_what_the_other_says(imported):
    notes = imported(MEGATRON).provenance.notes.splitlines()
    assert "Memory, at tp_size 1 too, is what was measured with sequence parallelism." in notes
    assert (
        "At tp_size 1 the tables without sequence parallelism say otherwise, and are not used: parameter_size of type 0"
        " 24 MiB, not 16 MiB, activation of type 0 30 MiB, not 44 MiB, checkpoint of type 0 2 MiB, not 4 MiB,"
        " model_states of embedding and head 64 MiB, not 96 MiB, activation of embedding and head 20 MiB, not 28 MiB."
    ) in notes
    notes = imported(NONE).provenance.notes.splitlines()
    assert "Memory, at tp_size 1 too, is what was measured without sequence parallelism." in notes
    (other,) = (note for note in notes if "say otherwise" in note)
    assert other.startswith("At tp_size 1 the tables with sequence parallelism say otherwise")
    assert "activation of type 0 44 MiB, not 30 MiB" in other


def test_tables_that_agree_at_tp_size_1_need_no_such_note(imported, two_tables):
    alike = two_tables | {f"{key}_sp": table for key, table in two_tables.items() if not key.endswith("_sp")}
    alike["layertype_0_sp"] = {"32": layer(24.0, {1: 30.0, 2: 15.0}, 2.0)}
    assert "say otherwise" not in imported(memory=alike).provenance.notes
    one = {key: table for key, table in two_tables.items() if key.endswith("_sp")}
    assert "say otherwise" not in imported(memory=one).provenance.notes


def test_what_one_table_lacks_is_never_filled_from_the_other(imported, two_tables, rows_of, states_of):
    del two_tables["layertype_0_sp"]["32"]["tp_activation_per_bsz_dict"]["1"]
    del two_tables["other_memory_pp_off_sp"]
    profile = imported(MEGATRON, two_tables)
    rows, notes = rows_of(profile), profile.provenance.notes
    assert rows[("block", 1, "none", "none", 1)]["activation_source"] == "absent"
    assert rows[("block", 1, "none", "full", 1)]["activation_source"] == "derived"
    assert rows[("head", 1, "none", "none", 1)]["activation_source"] == "absent"
    assert states_of(profile)[("head", 1)]["bytes_source"] == "absent"
    assert "activation of type 0 30 MiB, not nothing" in notes
    assert "has no table of embedding and head with sequence parallelism: their memory is absent" in notes


def test_raw_rows_of_a_kind_without_a_table_are_taken_only_when_asked_for(imported, memory_file, rows_of):
    del memory_file["layertype_0_sp"]
    memory_file["layertype_0"] = {"32": layer(24.0, {1: 30.0, 2: 18.0}, 2.0)}
    held = ("block", 1, "none", "none", 1)
    assert rows_of(imported(memory=memory_file))[held]["activation_bytes"] == 30 * MIB
    profile = imported(MEGATRON, memory_file)
    assert rows_of(profile)[held]["activation_bytes"] == 10 * MIB
    assert "recomputed from the raw rows" in profile.provenance.notes
    rows_alone = {key: rows for key, rows in memory_file.items() if key[0].isdigit()}
    assert rows_of(imported(memory=rows_alone)) == rows_of(imported(MEGATRON, rows_alone))


@pytest.mark.parametrize(("asked", "suffix"), [(MEGATRON, ""), (NONE, "_sp")])
def test_a_kind_that_the_file_lacks_is_refused(imported, two_tables, asked, suffix):
    one = {key: table for key, table in two_tables.items() if key.endswith("_sp") == bool(suffix)}
    with pytest.raises(BadInput, match=f"no memory with sequence_parallel {asked.value}"):
        imported(asked, one)


@pytest.mark.parametrize(("option", "taken"), [((), MEGATRON), (("--sequence-parallel", "none"), NONE)])
def test_the_command_takes_a_kind_for_the_profile_and_for_a_flat_model(
    command, tmp_path, request_for, two_tables, rows_of, option, taken
):
    request_for(memory=two_tables)
    described, out = tmp_path / "model.json", tmp_path / "out.h5"
    files = ("--computation", tmp_path / "times.json", "--memory", tmp_path / "memory.json")
    made = ("--type", "block,4,32,16,8", "--model-out", described, "--out", out, "--device", "A100")
    done = command("import", "galvatron", *map(str, files + made), "--backward-ratio", "2", *option)
    assert done.returncode == 0, done.stderr
    held = rows_of(read_model_profile(out))[("block", 1, "none", "none", 1)]
    assert held["activation_bytes"] == FIGURES[taken]["none"][0] * MIB
    types = read_document(described, Model).types
    assert types["block"].parameter_count() == FIGURES[taken]["parameters"][0] * MIB // 4
    assert types["head"].parameter_count() == FIGURES[taken]["ends' states"][0] * MIB // 16 // 2


def test_a_kind_of_tables_without_a_file_of_them_is_refused(command, one_error_line, tmp_path, request_for):
    request_for()
    before = set(tmp_path.iterdir())
    files = ("--computation", str(tmp_path / "times.json"), "--out", str(tmp_path / "out.h5"), "--device", "A100")
    done = command("import", "galvatron", *files, "--backward-ratio", "2", "--sequence-parallel", "none")
    assert "--sequence-parallel: chooses among memory tables" in one_error_line(done, 2, tmp_path, before)


def test_types_of_one_model_are_of_one_kind_too(imported, two_tables, rows_of):
    types = (FlatType("encoder", 2, 32, 16, 8), FlatType("decoder", 2, 64, 32, 8))
    times = {"layernum[2,2]_bsz1_seq[32,64]": 20.0, "layernum[4,2]_bsz1_seq[32,64]": 24.0}
    times["layernum[2,4]_bsz1_seq[32,64]"] = 28.0
    two_tables["layertype_1"] = {"64": layer(8.0, {1: 7.0, 2: 5.0}, 1.0)}
    rows = rows_of(imported(memory=two_tables, times=times, types=types))
    assert rows[("encoder", 1, "none", "none", 1)]["activation_bytes"] == 44 * MIB
    assert rows[("decoder", 1, "none", "none", 1)]["activation_source"] == "absent"
    assert not [name for name, tp_size, *_ in rows if (name, tp_size) == ("decoder", 2)]
