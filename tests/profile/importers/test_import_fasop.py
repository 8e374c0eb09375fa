from pathlib import Path

import msgspec
import pytest

from shardwright.io import BadInput, write_document
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types.hardware_profile import Collective, CollectiveKey, read_hardware_profile
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.importers.fasop import (
    FasopConstants,
    FasopGrowth,
    FasopRequest,
    fasop_hardware,
    import_fasop,
    read_fasop,
    read_fasop_times,
)
from shardwright_profile.options import FasopHardwareOptions, FasopOptions

REFERENCE = Path(__file__).parents[3] / "config" / "reference"
TIMES = REFERENCE / "fasop-layer-times.csv"
CONSTANTS = REFERENCE / "fasop-constants.json"
GROWTH = REFERENCE / "fasop-growth.json"
HEADER = "model,gpu,tp_size,kind,layers,forward_s\n"


_PRESETS = {"gpt2XL": ("gpt2-xl", {"n_head": 16}), "bert": ("bert-large", {}), "T5": ("t5-3b", {})}


def described(fasop_model, length):
    """A model of FASOP's, with as many heads as it has there."""
    name, replaced = _PRESETS[fasop_model]
    return model_of_config(read_presets()[name].config | replaced, fasop_model, length, name)


@pytest.fixture
def profile_of():
    def made(fasop_model="gpt2XL", gpu="A100", times=TIMES, model=None, length=1024, sizes=None, growth=None):
        model = model or described(fasop_model, length)
        named = {"times": times, "constants": CONSTANTS, "model": Path("model.json"), "out": Path("x.h5")}
        options = FasopOptions(
            model_name=fasop_model, gpu=gpu, device=gpu, backward_ratio=2.0, micro_batch_sizes=sizes, growth=growth,
            **named,
        )  # fmt: skip
        factors = growth and read_fasop(growth, FasopGrowth)
        constants = read_fasop(CONSTANTS, FasopConstants)
        return import_fasop(FasopRequest(options, read_fasop_times(times), constants, model, factors))

    return made


def rows_of(profile):
    return {
        (row.type, row.tp_size, row.recompute, row.micro_batch_size): msgspec.structs.asdict(row)
        for row in profile.layers.rows
    }


def test_the_table_has_the_72_figures_of_18_arrays():
    tables = read_fasop_times(TIMES)
    assert len(tables) == 6
    assert sum(len(kinds) for kinds in tables.values()) == 72
    lines = [line.split(",") for line in TIMES.read_text().splitlines() if not line.startswith("#")][1:]
    lengths = {}
    for model, gpu, tp_size, _, layers, _ in lines:
        lengths[(model, gpu, tp_size)] = lengths.get((model, gpu, tp_size), 0) + int(layers)
    assert {(key[0], length) for key, length in lengths.items()} == {("gpt2XL", 50), ("bert", 26), ("T5", 50)}
    assert len(lengths) == 18


def test_times_are_in_seconds_at_micro_batch_1_with_the_traffic_inside(profile_of):
    rows = rows_of(profile_of())
    for tp_size, forward_s in ((1, 0.0016384583333333331), (2, 0.0015983830416666667), (4, 0.001452470833333333)):
        row = rows[("block", tp_size, "none", 1)]
        assert (row["forward_s"], row["forward_source"]) == (forward_s, "measured")
        assert (row["backward_s"], row["backward_source"]) == (2 * forward_s, "assumed")
        assert rows[("block", tp_size, "full", 1)]["backward_s"] == pytest.approx(3 * forward_s)
    assert rows[("embedding", 4, "none", 1)]["forward_s"] == 0.000749588
    assert rows[("head", 1, "none", 1)]["forward_s"] == 0.00073


def test_times_grow_by_fasops_own_factors_and_else_in_proportion(profile_of):
    sizes = "1,2,4,8,16,32"
    profile = profile_of("bert", "A10", length=512, sizes=sizes, growth=GROWTH)
    rows = rows_of(profile)
    one_s = {name: rows[(name, 1, "none", 1)]["forward_s"] for name in ("embedding", "block", "head")}
    for size, block, embedding in ((2, 1, 1), (4, 1, 1), (8, 2, 2), (16, 4, 4), (32, 8, 8)):
        for name, factor in (("block", block), ("embedding", embedding), ("head", size)):
            row = rows[(name, 1, "none", size)]
            assert row["forward_s"] == pytest.approx(factor * one_s[name])
            assert row["backward_s"] == pytest.approx(2 * factor * one_s[name])
            assert row["forward_source"] == "assumed"
    assert "embedding, transformer at larger micro-batches" in profile.provenance.notes
    assert "launch-bound" not in profile.provenance.notes
    t5 = rows_of(profile_of("T5", "A100", length=512, sizes=sizes, growth=GROWTH))
    for name, factor in (("encoder", 1.746597), ("decoder", 1.921986)):
        assert t5[(name, 1, "none", 8)]["forward_s"] == pytest.approx(factor * t5[(name, 1, "none", 1)]["forward_s"])
    plain, grown = (profile_of(sizes=sizes, growth=growth) for growth in (None, GROWTH))
    assert rows_of(plain) == rows_of(grown), "its source has no factors of GPT-2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"citation": "c", "factors": {"bert": {"A10": {"head": {"0": 1.0}}}}}', ">= 1"),
        ('{"citation": "c", "factors": {"bert": {"A10": {"head": {"2": 0}}}}}', "> 0"),
        ('{"citation": "c", "factors": {"bert": {"A10": {"head": {}}}}}', "length >= 1"),
        ('{"factors": {}}', "citation"),
    ],
)
def test_factors_that_cannot_be_are_one_line(tmp_path, content, says):
    (tmp_path / "growth.json").write_text(content)
    with pytest.raises(BadInput, match=says) as error:
        read_fasop(tmp_path / "growth.json", FasopGrowth)
    assert str(error.value).startswith(str(tmp_path / "growth.json"))


def test_what_t5s_last_layers_have_more_than_others_is_the_heads(profile_of):
    rows = rows_of(profile_of("T5", "A100", length=512))
    head = rows[("head", 1, "none", 1)]
    assert head["forward_s"] == pytest.approx(0.0011881197 - 0.001170739 + 0.0021149037 - 0.002099025)
    assert head["forward_source"] == "derived"
    assert rows[("embedding", 1, "none", 1)]["forward_s"] == pytest.approx(0.000190997 + 0.000220585)
    assert rows[("decoder", 1, "none", 1)]["forward_s"] == 0.002099025


def test_what_is_not_published_is_absent_and_larger_micro_batches_are_assumed(profile_of):
    profile = profile_of(sizes="4")
    assert set(profile.states["bytes_source"]) == set(profile.process["process_source"]) == {b"absent"}
    row = rows_of(profile)[("block", 1, "none", 4)]
    assert (row["forward_s"], row["forward_source"]) == (4 * 0.0016384583333333331, "assumed")
    assert "93cb38bb1a88d1e3f58a0dbe1fe2d87f60a77254" in profile.provenance.notes


@pytest.mark.parametrize(
    ("fasop_model", "length", "hidden", "heads"), [("gpt2XL", 1024, 1600, 16), ("bert", 512, 1024, 16)]
)
def test_activations_are_those_of_korthikantis_formula_from_the_models_shapes(
    profile_of, fasop_model, length, hidden, heads
):
    """FASOP's own formula, too: its memory has s b h (10 + 24/t + 5 a s / (h t)) of a block."""
    profile = profile_of(fasop_model, length=length, sizes="4")
    assert set(profile.layers["activation_source"]) == set(profile.layers["workspace_source"]) == {b"analytic"}
    rows = rows_of(profile)
    for tp_size, size in ((1, 1), (2, 4), (4, 4)):
        bytes_ = rows[("block", tp_size, "none", size)]["activation_bytes"]
        formula = size * length * hidden * (10 + 24 / tp_size + 5 * heads * length / (hidden * tp_size))
        assert bytes_ == pytest.approx(formula, rel=0.03)
    assert rows[("block", 1, "full", 4)]["activation_bytes"] == 4 * length * hidden * 2
    assert "\nanalytic: activations and workspace are derived from the model's shapes" in profile.provenance.notes


def test_a_model_of_no_known_family_is_refused(profile_of):
    with pytest.raises(BadInput, match="unknown model family 'galvatron'"):
        profile_of(model=msgspec.structs.replace(described("gpt2XL", 1024), family="galvatron"))


def test_layers_that_wait_for_their_host_are_told(profile_of):
    notes = profile_of(sizes="1,4").provenance.notes
    assert "launch-bound: block takes 41 to 47 us for each of about 35 kernels (micro_batch_size 1, tp_size 1" in notes


def test_tensor_parallelism_that_slows_a_layer_down_is_named(profile_of):
    notes = profile_of("bert", "A100", length=512).provenance.notes
    assert "block takes 1.444 ms at tp_size 1 and 1.64 ms at 2: kept as published." in notes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "its columns are not"),
        ("model,gpu\n", "its columns are not"),
        (HEADER + "m,g,1,transformer,1\n", "line 2 is not a row"),
        (HEADER + "m,g,x,transformer,1,1.0\n", "line 2 is not a row"),
        (HEADER + "m,g,1,transformer,1,nan\n", "line 2 has an impossible number"),
        (HEADER + "m,g,1,transformer,1,-1\n", "line 2 has an impossible number"),
        (HEADER + "m,g,0,transformer,1,1\n", "line 2 has an impossible number"),
        (HEADER + "m,g,1,transformer,1,1e9\n", "line 2 has an impossible number"),
        (HEADER + "m,g,1,transformer,1,1.0\n" * 2, "line 3 repeats transformer"),
        (HEADER + "gpt2XL,A100,1,transformer,1,1.0\n", "no embedding of gpt2XL on A100 at tp_size 1"),
        (HEADER + "gpt2XL,A10,1,transformer,1,1.0\n", "no times of gpt2XL on A100, only of gpt2XL on A10"),
        ("é", "more than ASCII"),
    ],
)
def test_an_impossible_table_is_one_clear_line(profile_of, tmp_path, text, problem):
    (tmp_path / "times.csv").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=problem):
        profile_of(times=tmp_path / "times.csv")


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [
        ({"length": 512}, "timed at sequence_length 1024, not 512"),
        ({"model": described("T5", 1024)}, "has 1 types of layers, model 'T5' 2"),
    ],
)
def test_another_model_is_refused(profile_of, replaced, problem):
    with pytest.raises(BadInput, match=problem):
        profile_of(**replaced)


def test_a_bandwidth_is_in_bits_and_divided_as_fasop_divides_it():
    of = {"constants": CONSTANTS, "setting": "default", "gpu": "A100", "device": "A100", "out": Path("hardware.h5")}
    profile = fasop_hardware(read_fasop(CONSTANTS, FasopConstants), FasopHardwareOptions(**of, nodes=2, cluster="toys"))
    mib = 1024**2

    def at(collective, ranks, on_a_node, consecutive=True):
        sizes, times_s = profile.curves[CollectiveKey(collective, ranks, on_a_node, consecutive)]
        return times_s[sizes.tolist().index(mib)]

    assert at(Collective.P2P, 2, 2) == pytest.approx(mib * 8 / (1840e9 / 3.5))
    assert at(Collective.P2P, 2, 1) == pytest.approx(mib * 8 / (40e9 / 1.05))
    assert at(Collective.ALL_REDUCE, 4, 4) == pytest.approx(2 * 3 / 4 * mib * 8 / (1840e9 / 3.5))
    assert at(Collective.ALL_GATHER, 8, 4) == pytest.approx(7 / 8 * mib * 8 / (40e9 / 1.05))
    assert set(profile.points["source"]) == {b"derived"}
    assert CollectiveKey(Collective.ALL_REDUCE, 8, 8, True) not in profile.curves


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("{}", "missing required field"),
        (CONSTANTS.read_text().replace("3.5", "0"), "Expected `float` > 0"),
        (CONSTANTS.read_text().replace("3.5", "-1"), "Expected `float` > 0"),
        (CONSTANTS.read_text().replace("40.0e9", "NaN", 1), "not a finite number"),
    ],
)
def test_impossible_constants_are_one_clear_line(tmp_path, text, problem):
    (tmp_path / "constants.json").write_text(text)
    with pytest.raises(BadInput, match=problem):
        read_fasop(tmp_path / "constants.json", FasopConstants)


def test_the_commands_write_what_can_be_read(command, tmp_path):
    write_document(tmp_path / "model.json", described("gpt2XL", 1024))
    of = ("--constants", str(CONSTANTS), "--gpu", "A10", "--device", "A10")
    model = ("--times", str(TIMES), "--model-name", "gpt2XL", "--model", str(tmp_path / "model.json"))
    done = command("import", "fasop", *of, *model, "--backward-ratio", "2", "--out", str(tmp_path / "m.h5"))
    assert done.returncode == 0, done.stderr
    assert read_model_profile(tmp_path / "m.h5").origin.device == "A10"
    links = ("--setting", "pareto", "--nodes", "2", "--cluster", "toys", "--out", str(tmp_path / "h.h5"))
    done = command("import", "fasop-hardware", *of, *links)
    assert done.returncode == 0, done.stderr
    assert read_hardware_profile(tmp_path / "h.h5").cluster == "toys"
