import json
from pathlib import Path

import pytest

from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Model
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.importers.documents import FlatType, parse_type
from shardwright_profile.importers.galvatron.keys import read_computation
from shardwright_profile.importers.galvatron.model import import_galvatron

MIB = 1024**2
TIMES = {
    f"layernum[{layers}]_bsz{batch}_seq32": layers * (1 + 2 * batch) + 3 + batch
    for layers in (2, 4)
    for batch in (1, 2, 4)
}
FALLING = TIMES | {"layernum[4]_bsz2_seq32": 14.9}
SHORT = {key: value for key, value in TIMES.items() if key != "layernum[4]_bsz2_seq32"}


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        ("{", "not valid JSON"),
        (json.dumps(TIMES)[:-9], "not valid JSON"),
        ("[]", "not an object"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ({}, "contains no times of layers"),
        (json.dumps(TIMES | {"layernum[4]_bsz4_seq32": float("nan")}), "not a finite number"),
        (json.dumps(TIMES).replace("16}", "1e999}").replace(": 16,", ": 1e999,"), "finite"),
        (TIMES | {"layernum[4]_bsz4_seq32": -1.0}, "'layernum[4]_bsz4_seq32' is -1, not positive"),
        (TIMES | {"layernum[4]_bsz4_seq32": 0}, "not positive"),
        (TIMES | {"layernum[4]_bsz4_seq32": "9"}, "is '9', not a number"),
        (TIMES | {"layernum[4]_bsz4_seq32": True}, "is True, not a number"),
        (TIMES | {"layernum[4]_bsz4_seq32": 1e30}, "implausibly large"),
        (TIMES | {f"layernum[4]_bsz{'9' * 5000}_seq32": 1.0}, "declares a size of 99999"),
        (TIMES | {"layernum[4]_bsz0_seq32": 1.0}, "a batch of 0"),
        (TIMES | {f"layernum[{'1,' * 5000}1]_bsz1_seq32": 1.0}, "declares the list"),
        (TIMES | {"layernum[4,4]_bsz4_seq32": 1.0}, "different counts of types"),
        ({"layernum[2]_bsz1_seq64": 1.0}, "no times at sequence_length 32, only at 64"),
        ({"layernum[2]_bsz1_seq32": 1.0}, "layernum[2] at batch 1 has no row with another number of layers"),
        ({"layertype_0_bsz1_seq32": 1.0}, "no times at sequence_length 32, only at none"),
        (SHORT, "layernum[2] at batch 2 has no row with another number of layers"),
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


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("layertype_0", "32", "parameter_size"), -1, "not positive"),
        (("layertype_0", "32", "tp_activation_per_bsz_dict", "1"), -1, "below 0"),
        (("layertype_0", "32", "tp_activation_per_bsz_dict", "1"), "x", "not a number"),
        (("layertype_0", "32", "tp_activation_per_bsz_dict", "0"), 1, "instead of a tp_size"),
        (("layertype_0", "32", "more"), 1, "has keys"),
        (("layertype_0", "32"), 7, "not an object"),
        (("layertype_0", "x"), {}, "declares"),
        (("1_1_2",), 3, "not an object"),
        (("1_1_2", "strange"), 3, "'strange' of '1_1_2' is unknown"),
        (("1_1_2", "layernum[1]_bsz8_seq32_rank0_ms"), -3, "below 0"),
        (("other_memory_pp_off", "32", "model_states"), {"1": None}, "not a number"),
    ],
)
def test_impossible_memory_is_one_clear_line(request_for, memory_file, path, value, problem):
    inner = memory_file
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(BadInput) as caught:
        import_galvatron(request_for(memory=memory_file))
    assert problem in str(caught.value)


def test_a_file_without_memory_is_refused(request_for):
    with pytest.raises(BadInput, match="contains no memory measurements of layers"):
        request_for(memory={})


def test_a_file_beyond_16_mib_is_not_read(tmp_path):
    with (tmp_path / "times.json").open("wb") as file:
        file.truncate(16 * MIB + 1)
    with pytest.raises(BadInput, match="larger than 16 MiB"):
        read_computation(tmp_path / "times.json")


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [
        ({"tp_sizes": (1, 2)}, "pass --hardware"),
        ({"types": (FlatType("block", 4, 32, 16, 8), FlatType("other", 1, 32, 16, 8))}, "times of 1 types of layers"),
    ],
)
def test_what_does_not_belong_together_is_refused(request_for, replaced, problem):
    with pytest.raises(BadInput, match=problem):
        import_galvatron(request_for(**replaced))


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
        (("--type", "block,4,32,16", "--model-out", "m.json"), "'block,4,32,16' is not a type"),
        (("--type", "head,4,32,16,8", "--model-out", "m.json"), "is not a type"),
        (("--type", "block,4,32,16,8", "--model-out", "m.json", "--tp-sizes", "1,x"), "not a list of whole numbers"),
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
