"""`shardwright advise`: what it says by hand-computed cases, what it refuses, and what it must not import."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.command.command_line import _exit_code
from shardwright.devices.table import read_devices
from shardwright.devices.utilization import MFU_COUNTS, model_flops_utilization
from shardwright.estimate.notes import SEEN
from shardwright.io import BadInput, read_document
from shardwright.models.registry import FAMILIES, read_presets
from shardwright.types import DataParallel, Plan, Schedule, SequenceParallel
from shardwright_search.advise import report
from shardwright_search.advise.choices import RULES, plan_of_rule, reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.advise.report import usd_per_billion_tokens
from shardwright_search.candidates import Candidate
from shardwright_search.cli import APP
from shardwright_search.commands import advise
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.search import StoppedEarly, find_best
from shardwright_search.simplest import Simple

ROOT = Path(__file__).parents[2]


def _question(model="llama-2-7b", gpus="2x8:H100-SXM", batch=64, **more):
    return question_of(AdviseOptions(model=str(model), gpus=gpus, batch=batch, **more))


def test_fp8_speeds_up_the_products_of_blocks_and_leaves_memory_as_it_is(config, tmp_path, capsys):
    """Of a block's 12 products none is slower, and no step is twice as fast: attention, head and messages stay."""
    steps, memory = {}, {}
    for precision in ("bfloat16", "fp8"):
        question = _question("llama-3-8b", "1x8:B200", 64, seq=4096, precision=precision)
        plan = question.setting.plan(question.setting.uniform("mine", 1, 8, tp_size=2), "mine")
        estimate = evaluate(plan, question.profiles).estimate
        steps[precision], memory[precision] = estimate.simulated_step_time_s, estimate.memory_bytes
    assert 1.2 < steps["bfloat16"] / steps["fp8"] < 2
    assert memory["bfloat16"] == memory["fp8"]
    arguments = (config, "--gpus", "1x8:RTX-5090", "--batch", 8, "--seq", 512, "--precision", "fp8")
    code, told, _ = _advise(capsys, *arguments, "--out", tmp_path / "plan.json")
    assert code == 0 and "fp8: products with the weights of blocks alone" in told
    assert read_document(tmp_path / "plan.json", Plan).precision.text == "float32/fp8/float32"
    code, told, refused = _advise(
        capsys, config, "--gpus", "8:A100-80", "--batch", 8, "--seq", 512, "--precision", "fp8"
    )
    assert (code, told) == (2, "")
    assert refused == "error: --precision: the table has no rate for fp8 products of A100-80: take bfloat16\n"


def _advise(capsys, *arguments):
    """Exit code, answer and errors; the answer is the best plan, however busy the machine is."""
    limit = () if "--time-limit" in arguments else ("--time-limit", 600)
    code = _exit_code(APP, ["advise", *map(str, (*arguments, *limit))])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_answer_says_everything_that_was_asked(config, tmp_path, capsys):
    out = tmp_path / "plan.json"
    code, told, _ = _advise(
        capsys, config, "--gpus", "8:H100-SXM", "--batch", 16, "--seq", 512, "--out", out, "--against", "tp=8,mbs=1"
    )
    assert code == 0
    for words in (
        " of 80 GiB a GPU, ",
        "fits: ",
        "nine of ten published runs held 0.88 to 1.23 times",
        "best plan: pp",
        "s a step",
        "tokens/s",
        "MFU",
        "USD per billion tokens",
    ):
        assert words in told
    for words in (
        "proven optimal under these estimates",
        "memory of the fullest rank",
        "less of it by",
        "rule:nvidia-table",
    ):
        assert words in told
    for words in (
        "against tp=8,mbs=1",
        " times the time, ",
        "here is what differs",
        "assumed",
        "8% of 80 GiB left",
        MFU_COUNTS,
        SEEN,
    ):
        assert words in told
    assert MFU_COUNTS in told
    assert (
        "  not searched: interleaved schedules of over 16 chunks a stage (--against pp=2,vpp=32 prices one), context "
        in told
    )
    assert "offloading to the host\n" in told
    plan = read_document(out, Plan)
    assert (plan.global_batch_size, plan.model.sequence_length, plan.cluster.num_devices) == (16, 512, 8)


def test_a_small_model_waits_for_the_host_as_it_is_told_to_launch_kernels(config, capsys):
    asked = (config, "--gpus", "8:H100-SXM", "--batch", 16, "--seq", 512, "--against", "tp=8,mbs=1")
    steps_s = []
    for options, kernel_us, blocks in (
        ((), 42, "eager"),
        (("--compile",), 42, "compiled"),
        (("--launch-us", 0), 0, "eager"),
    ):
        code, told, error = _advise(capsys, *asked, *options)
        assert code == 0, error
        assert re.search(rf", {kernel_us} us of the host for each kernel, .*, of {blocks} blocks", told)
        steps_s.append(float(re.search(r"([0-9.e-]+) s a step", told)[1]))
    assert steps_s[0] > 1.5 * steps_s[1] > 1.5 * steps_s[2]


def test_a_batch_size_that_the_gpus_divide_is_named_beside_one_that_they_do_not(capsys):
    command = "llama-3-8b", "--gpus", "1x13:H100-SXM", "--seq", 4096, "--batch"
    code, told, _ = _advise(capsys, *command, 32)
    assert code == 0 and "batch 32: fits" in told
    gives = dict(
        re.findall(r"--batch (\d+) gives [\d,]+ tokens/s, MFU ([\d.]+)%.*: 13 GPUs divide it, and not 32", told)
    )
    _, divided, _ = _advise(capsys, *command, 26)
    assert gives.keys() == {"26", "39"} and f"MFU {gives['26']}%" in divided and "GPUs divide it" not in divided
    asked = float(re.search(r"predicted .*MFU ([\d.]+)%", told)[1])
    assert float(gives["26"]) > 1.3 * asked


def test_a_plan_of_many_strategies_is_not_called_simple(capsys, monkeypatch):
    asked = "mixtral-8x7b", "--gpus", "8x8:H100-SXM", "--batch", 512
    told = " ".join(_advise(capsys, *asked)[1].split())
    assert "simplest plan within 2% of the bound: pp2" in told and "fastest plan, 0.3 % less time" in told
    monkeypatch.setattr(report, "FEW", 0)
    monkeypatch.setattr(report, "_NO_GAIN", 1.0)
    told = " ".join(_advise(capsys, *asked)[1].split())
    assert "best plan, none of at most 0 strategies was found within 2% of the bound: pp2" in told
    assert "no plan is more than" in told and "fastest plan" not in told


def test_what_is_proven_beside_a_simple_answer_is_of_the_closed_form():
    """Also if the fastest plan gains more by simulation than the bound leaves: of that nothing is proven."""
    question = _question("gpt2-xl", "1x8:A100-40", 128)
    given = question.request, question.model, question.cluster, question.profiles, Path("--gpus")
    answer = find_best(*given, lambda _: None)
    estimate = answer.chosen.evaluation.estimate
    quicker = replace(estimate, simulated_step_time_s=0.9 * estimate.simulated_step_time_s)
    quick = Candidate(replace(answer.chosen.plan, name="quick"), answer.chosen.evaluation._replace(estimate=quicker))
    simple = Simple(answer.chosen, quick, None, 0.02)
    told = "\n".join(report.Advice(question, answer, (), (), simple=simple).lines)
    gap = estimate.objective_s / answer.bound_s - 1
    assert gap < 0.01
    assert f"no plan is more than {gap * 100:.1f} % faster by the closed form, proven under these estimates" in told
    assert "fastest plan, 10.0 % less time" in told


def test_utilization_and_price_are_those_by_hand():
    question = _question()
    choice = question.setting.uniform("mine", 2, tp_size=2, data_parallel=DataParallel.ZERO2)
    plan = question.setting.plan(choice, "mine")
    estimate = evaluate(plan, question.profiles).estimate
    # 6 FLOPs a weight of a matrix and token, and 12 a feature, layer and position attended to.
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    tokens_per_s = 64 * 4096 / estimate.simulated_step_time_s
    # Causal attention sees half of the positions, and each its own.
    utilization = model_flops_utilization(plan, estimate.simulated_step_time_s)
    for seen, share in zip((4097 / 2, 4096), utilization, strict=True):
        flops_per_token = 6 * matrices + 12 * 32 * 4096 * seen
        assert share == pytest.approx(flops_per_token * tokens_per_s / (16 * 989.5e12), rel=1e-9)
    usd_per_s = 16 * read_devices().devices["H100-SXM"].usd_per_hour / 3600
    assert usd_per_billion_tokens(plan, estimate) == pytest.approx(usd_per_s / tokens_per_s * 1e9)
    given = _question(price_per_gpu_hour=2.0)
    priced = evaluate(given.setting.plan(given.setting.uniform("mine", 2, tp_size=2), "mine"), given.profiles).estimate
    assert usd_per_billion_tokens(plan, priced) == pytest.approx(
        16 * 2 / 3600 * priced.simulated_step_time_s / (64 * 4096) * 1e9
    )


def test_heads_that_no_tp_size_divides_leave_it_to_embedding_and_head(capsys):
    """GPT-2 XL has 25 heads."""
    code, told, error = _advise(capsys, "gpt2-xl", "--gpus", "8:V100-32", "--batch", 64, "--precision", "float16")
    assert (code, error) == (0, "")
    assert "rule:tp8" in told and "proven optimal under these estimates" in told


def test_a_choice_that_the_gpus_cannot_hold_says_by_how_much(capsys):
    code, told, _ = _advise(
        capsys, "llama-2-7b", "--gpus", "8:A100-40", "--batch", 16, "--against", "tp=1,mbs=2", "--uniform"
    )
    assert code == 0
    question = _question(gpus="8:A100-40", batch=16)
    plan = reading_of("tp=1,mbs=2", question.setting).plan
    own = evaluate(plan, question.profiles).estimate.memory_bytes
    assert (
        f"it does not fit: it exceeds 36.8 GiB a GPU by {(own - question.budgets['A100-40']) / 2**30:.2f} GiB a rank"
        in told
    )


def test_a_search_that_is_stopped_is_never_worse_than_a_rule(capsys, tmp_path):
    code, told, _ = _advise(
        capsys, "llama-2-7b", "--gpus", "2x8:H100-SXM", "--batch", 64, "--time-limit", 0, "--out", tmp_path / "p.json"
    )
    assert code == 0 and "not proven: how much faster another plan may be is not known; the search was stopped" in told
    question, best = _question(), read_document(tmp_path / "p.json", Plan)
    step_s = evaluate(best, question.profiles).estimate.simulated_step_time_s
    for name in RULES:
        plan = plan_of_rule(name, question, lambda _: True)
        estimate = evaluate(plan, question.profiles).estimate
        assert not question.fits(plan, estimate) or step_s <= estimate.simulated_step_time_s


def test_what_fits_nowhere_ends_with_3_and_says_by_how_much(capsys, tmp_path):
    code, told, error = _advise(
        capsys, "llama-3-70b", "--gpus", "8:A100-40", "--batch", 8, "--out", tmp_path / "plan.json"
    )
    assert (code, told) == (3, "")
    assert (
        "even the leanest exceeds it by" in error.splitlines()[0]
        and "\n  --gpus 4x8:A100-40 (the fewest nodes)" in error
    )
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MODEL": "lama3.1-8B"}, "error: lama3.1-8B: is neither a file nor a preset: did you mean llama-3.1-8b or "),
        (
            {"MODEL": "nothing"},
            "error: nothing: is neither a file nor a preset: give a config.json, or one that ",
        ),
        ({"--gpus": "H100-SXM"}, "is not NODESxGPUS:DEVICE"),
        ({"--gpus": "8:H1000"}, "error: --gpus: 'H1000' is not in the table of devices: did you mean H100-"),
        ({"--gpus": "8:a100"}, "error: --gpus: 'a100' may be A100-40 or A100-80: give one of them"),
        ({"--gpus": "8:?"}, "error: --gpus: '?' is not in the table of devices: choose from "),
        ({"--gpus": "0x8:H100-SXM"}, "0 nodes of 8 GPUs"),
        ({"--gpus": "2x8:L4"}, "--inter-node-gbit-s: what nodes of L4 send is not known"),
        ({"--budget-gib": "81"}, "--budget-gib: 81 is more than a H100-SXM has, 80"),
        ({"--seq": "8192"}, "sequence length 8192 is over 4096 positions"),
        ({"--batch": "0"}, "--batch"),
        ({"--against": "tp=3"}, "tp 3 x pp 1 does not divide 8 GPUs"),
        ({"--against": "tp=8,mbs=3"}, "dp 1 x mbs 3 does not divide the batch 16"),
        ({"MODEL": "swin-large", "--against": "tp=2,sp=1"}, "tp_size 2 does not divide windows_across_positions 1"),
        ({"--against": "tq=8"}, "'tq' is not a file, a rule or a key"),
        ({"--against": "tp=many"}, "tp 'many' is not a number from 1"),
        ({"--against": "zero=4"}, "zero '4': choose 0, 1, 2, 3"),
        ({"--against": "rule:tp9"}, "rule:tp9 is not a rule"),
        ({"--against": "rule:nvidia-table", "--gpus": "6:H100-SXM"}, "error: --against rule:nvidia-table: none of "),
        ({"--against=--context-parallel-size 2 --cp-comm-type a2a": None}, "cp_comm_type a2a is not priced"),
        ({"--against": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_bad_input_is_one_line_and_2(change, said, capsys, tmp_path):
    given = {
        "MODEL": "llama-2-7b",
        "--gpus": "8:H100-SXM",
        "--batch": "16",
        "--out": str(tmp_path / "p.json"),
        **change,
    }
    words = [given.pop("MODEL"), *(word for pair in given.items() for word in pair if word is not None)]
    code, told, error = _advise(capsys, *words, "--time-limit", 0)
    assert (code, told) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert not (tmp_path / "p.json").exists()


def test_no_choice_shares_out_a_sequence_that_layers_take_whole():
    question = _question("swin-large", "8:A100-40", 128)
    plans = [reading_of("tp=2,mbs=8", question.setting).plan, plan_of_rule("tp8", question, lambda _: True)]
    for plan in plans:
        assert {layer.tp_size for layer in plan.layers} == {2}
        assert {layer.sequence_parallel for layer in plan.layers} == {SequenceParallel.NONE}
    usual = reading_of("tp=2,mbs=8", _question(batch=128).setting).plan
    assert {layer.sequence_parallel for layer in usual.layers} == {SequenceParallel.MEGATRON}


def test_samples_are_as_long_as_usual_unless_a_config_has_fewer_positions(config):
    assert (question := _question(config)).model.sequence_length == 512
    assert "tokens a sample: 512, at most 4096 and the model's (--seq)" in question.assumed
    assert not any(line.startswith("tokens a sample") for line in _question(config, seq=256).assumed)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 131072}))
    assert _question(config).model.sequence_length == 4096
    t5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config.write_text(json.dumps(t5 | {"num_decoder_layers": 2, "vocab_size": 256}))
    with pytest.raises(BadInput, match=r"--seq: .*config.json does not state the sample length"):
        _question(config)


def test_a_model_priced_by_its_keys_is_said_to_be_approximate_everywhere(config, capsys, tmp_path):
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"model_type": "unheard_of", "residual_dropout": 0.1})
    )
    out, command = tmp_path / "plan.json", (config, "--gpus", "1:A100-40", "--batch", 8, "--seq", 256)
    code, told, error = _advise(capsys, *command)
    assert (code, told) == (2, "") and error.count("\n") == 1 and len(error.replace(str(config), "")) < 300
    assert "the nearest is llama: --as llama prices it by its keys, approximately" in error
    code, told, error = _advise(capsys, *command, "--as", "llama", "--out", out)
    assert code == 0 and f"{config.parent.name} (approximate, as llama) can be trained" in told.splitlines()[0]
    assert "approximate, as llama: without residual_dropout" in error
    assert read_document(out, Plan).model.name == f"{config.parent.name} (approximate, as llama)"
    assert _question(config.parent, seq=256, taken_as="llama").model.name.startswith(config.parent.name)


def test_the_patches_of_an_image_need_no_length(tmp_path, capsys):
    """224 / 16 = 14 patches on a side, and one position for the class."""
    vit = {"model_type": "vit", "image_size": 224, "patch_size": 16, "hidden_size": 192, "intermediate_size": 768}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(vit | {"num_hidden_layers": 4, "num_attention_heads": 3}))
    command = path, "--gpus", "1:A100-40", "--batch", 64
    code, told, error = _advise(capsys, *command)
    assert code == 0, error
    assert "197 tokens a sample" in told
    code, told, error = _advise(capsys, *command, "--seq", 196)
    assert (code, told) == (2, "")
    assert error.startswith("error: --seq: sequence length 196 is not the 197 positions of an image in ")


def test_scaled_rotary_embeddings_reach_as_far_as_their_configuration_says(config):
    def longest(**scaling):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_scaling": scaling}))
        with pytest.raises(BadInput, match=r"--seq: sequence length 999999 is over \d+ positions") as error:
            _question(config, seq=999_999)
        return re.search(r"over (\d+) positions \((.*)\) in", str(error.value)).groups()

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert longest(**yarn) == ("2048", "max_position_embeddings 512 x factor 4 of rope_scaling")
    assert _question(config, seq=2048).model.sequence_length == 2048
    assert longest(type="linear", factor=2) == ("1024", "max_position_embeddings 512 x factor 2 of rope_scaling")
    # What it is scaled to is said in these: 8 x 128 would be more.
    assert longest(**yarn | {"original_max_position_embeddings": 64}) == ("512", "max_position_embeddings")
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
    assert longest(**llama) == ("512", "max_position_embeddings")


@pytest.mark.usefixtures("usual_width")
def test_the_readme_quotes_the_answer(capsys):
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^shardwright advise (.*)$", readme, re.MULTILINE)
    _, said, _ = _advise(capsys, *command.split())
    quoted = readme.partition(command)[2].split("```")[2].strip().splitlines()
    assert len(quoted) > 5 and set(quoted) - {"..."} <= set(said.splitlines())


def test_a_search_without_an_answer_in_time_names_the_option(capsys, monkeypatch, config):
    def stopped(*_):
        raise StoppedEarly("--batch", "no plan was found", "give it more time")

    monkeypatch.setattr(advise, "find_best", stopped)
    code, told, error = _advise(capsys, config, "--gpus", "8:H100-SXM", "--batch", 16, "--seq", 512)
    assert (code, told) == (2, "")
    assert error == "error: --time-limit: expired before a plan was found: give more seconds\n"


def test_the_docs_list_the_families_of_the_registry_and_their_presets():
    rows = (ROOT / "docs" / "models.md").read_text().split("\n| --- | --- | --- |\n")[-1].split("\n\n")[0].splitlines()
    listed = {
        family: names
        for family, _, names in (map(str.strip, row.strip("|").split("|")) for row in rows if row.startswith("|"))
    }
    assert sorted(listed) == sorted(f"`{name}`" for name in FAMILIES)
    for name, preset in read_presets().items():
        assert f"`{name}`" in listed[f"`{preset.config['model_type']}`"].split(", ")


def test_interleaved_schedules_are_searched(capsys, config, tmp_path):
    """Memory leaves 4 stages and 4 microbatches: of two chunks a stage the bubble is 3/8 of the work, not 3/4."""
    wide = {"num_hidden_layers": 16, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    config.write_text(json.dumps(json.loads(config.read_text()) | wide | {"num_key_value_heads": 8}))
    out = tmp_path / "plan.json"
    command = config, "--gpus", "4x1:A100-80", "--batch", 4, "--seq", 512, "--inter-node-gbit-s", 100, "--out", out
    code, told, error = _advise(capsys, *command, "--launch-us", 0)
    assert code == 0, error
    assert read_document(out, Plan).schedule is Schedule.INTERLEAVED_1F1B
    assert "interleaved_1f1b" in told and "proven optimal under these estimates" in told


def test_presets_say_who_published_them_and_what_is_said_of_accuracy_stands_in_the_docs():
    assert len(read_presets()) > 10
    assert all(any(char.isdigit() for char in preset.source) for preset in read_presets().values())
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("accuracy.md", "analytic.md"))
    figures = [word for word in SEEN.replace(",", " ").split() if word[0].isdigit()]
    assert len(figures) > 3 and all(f"{figure} %" in pages for figure in figures)
