"""What `advise` leaves behind where it has no answer, and whether what it says to do helps."""

import json
import re

import pytest

from shardwright.command.command_line import _exit_code
from shardwright_search.cli import APP


def _advise(capsys, *arguments):
    """Exit code, answer and errors; the answer is the best plan, however busy the machine is."""
    code = _exit_code(APP, ["advise", *map(str, arguments), "--time-limit", "600"])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_folder_that_is_to_start_a_plan_is_new_and_appears_with_the_plan(config, tmp_path, capsys):
    asked = (config, "--gpus", "1:RTX-4090", "--batch", 16, "--seq", 256, "--for", "deepspeed", "--launch")
    code, told, error = _advise(capsys, *asked, tmp_path / "new" / "start", "--budget-gib", 0.01)
    assert (code, told) == (3, "") and "no plan that DeepSpeed runs fits in 10.2 MiB a GPU" in error
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "deepspeed.json").write_text("of the user")
    code, told, error = _advise(capsys, *asked, tmp_path / "mine")
    assert (code, told) == (2, "")
    assert error == f"error: {tmp_path}/mine: is not empty: choose a new folder, or remove what is in it\n"
    assert (tmp_path / "mine" / "deepspeed.json").read_text() == "of the user"


def _ways(error):
    """The options of each way out that is said to fit, by what it is."""
    lines = re.sub(r"\n {3,}", " ", error)
    found = re.findall(
        r"^  (--\S+ \S+(?: --\S+ \S+)*|without --uniform)(?: \((.*?)\))?: fits, (?:at most )?([\d.]+) s a step",
        lines,
        re.M,
    )
    return {name or option: (option, float(step_s)) for option, name, step_s in found}


def _options(text, folder):
    """The options of a text by name; `--lora FOLDER` names a folder that is made."""
    if "FOLDER" in text:
        folder.mkdir()
        adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    words = text.replace("FOLDER", str(folder)).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_each_way_out_that_is_named_fits_once_it_is_taken_in_the_time_that_is_said(capsys):
    """A budget that is 0.01 GiB less than the one that is named does not fit."""
    rest = {"--gpus": "1:A100-80", "--budget-gib": 68.8, "--batch": 2, "--seq": 131072}

    def told(**changes):
        options = rest | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return _advise(capsys, "llama-3.2-1b", "--tolerance", 0, *(part for pair in options.items() for part in pair))

    code, _, error = told()
    assert code == 3, error
    ways = _ways(error)
    assert {option.split()[0] for option, _ in ways.values()} == {
        "--budget-gib", "--gpus", "--parameters", "--optimizer", "--offload", "--lora", "--seq", "--batch"
    }  # fmt: skip
    for option, step_s in ways.values():
        name, value = option.removeprefix("--").split()
        if name == "lora":
            continue
        code, answer, _ = told(**{name.replace("-", "_"): value})
        assert code == 0 and f"predicted {step_s:.4g} s a step" in answer, option
    budget = float(re.search(r"--budget-gib (\S+): fits", error)[1])
    assert told(budget_gib=round(budget - 0.01, 2))[0] == 3


def test_what_brings_too_little_or_is_refused_is_said_and_what_fits_together(capsys, tmp_path):
    asked = "llama-3-70b --gpus 1:RTX-4090 --batch 1"
    code, _, error = _advise(capsys, *asked.split())
    assert code == 3
    assert "--gpus 128x1:RTX-4090: not possible: --batch: no strategy divides" in error
    assert "--seq 1024 (shorter samples): still exceeds the budget by" in error
    ((option, step_s),) = _ways(error).values()
    assert option == "--lora FOLDER --base 4bit --seq 1024 --gpus 1x2:RTX-4090"
    changed = {"--gpus": "1:RTX-4090", "--batch": 1} | _options(option, tmp_path / "lora")
    code, answer, _ = _advise(
        capsys, "llama-3-70b", "--tolerance", 0, *(part for pair in changed.items() for part in pair)
    )
    assert code == 0 and f"predicted {step_s:.4g} s a step" in answer


def test_nodes_of_a_network_that_is_not_known_are_joined_at_a_rate_that_is_said(capsys):
    code, _, error = _advise(capsys, "llama-3.2-3b", "--gpus", "1:RTX-4090", "--batch", 4, "--seq", 2048)
    option, step_s = _ways(error)["the fewest nodes, over an assumed network"]
    assert code == 3 and re.fullmatch(r"--gpus \dx1:RTX-4090 --inter-node-gbit-s 100", option)
    changed = {"--batch": 4, "--seq": 2048} | _options(option, None)
    code, answer, _ = _advise(
        capsys, "llama-3.2-3b", "--tolerance", 0, *(part for pair in changed.items() for part in pair)
    )
    assert code == 0 and f"predicted {step_s:.4g} s a step" in answer


_REFUSED = """
llama-3-70b --gpus 8:A100-40 --batch 8
llama-3-405b --gpus 8x8:H100-SXM --batch 512
mixtral-8x7b --gpus 1x8:A100-40 --batch 16
mixtral-8x7b --gpus 2x8:A100-40 --batch 64 --for deepspeed
llama-3.1-8b --gpus 1:RTX-4090 --batch 8
llama-3.1-8b --gpus 4:RTX-4090 --batch 32 --seq 4096
llama-3.1-8b --gpus 1:H100-SXM --batch 8
gpt2-xl --gpus 1:A10 --batch 8
llama-3.1-70b --gpus 1x8:H100-SXM --batch 64
llama-3.1-70b --gpus 1x8:H100-SXM --batch 64 --for torchtitan
qwen3-30b-a3b --gpus 1x8:A100-40 --batch 32
qwen3-32b --gpus 1x8:A100-40 --batch 32
deepseek-v3 --gpus 16x8:H100-SXM --batch 1024
qwen3-235b-a22b --gpus 4x8:H100-SXM --batch 256
gpt-oss-120b --gpus 1x8:H100-SXM --batch 64
gemma-3-27b --gpus 1x8:A100-40 --batch 32
llama-3.1-405b --gpus 8x8:H100-SXM --batch 128 --for megatron
llama-3.2-1b --gpus 1:A100-80 --batch 2 --seq 131072 --budget-gib 50
llama-3-70b --gpus 1x8:A100-40+1x8:A10 --batch 16 --inter-node-gbit-s 100
mistral-7b --gpus 2:V100-32 --batch 8 --precision float16
"""


@pytest.mark.long
@pytest.mark.parametrize("asked", _REFUSED.strip().splitlines(), ids=lambda line: line.replace(" --", " "))
def test_a_refusal_names_a_way_that_then_fits(capsys, tmp_path, asked):
    """Of the ways the first, in its own time limit."""
    model, *rest = asked.split()
    code = _exit_code(APP, ["advise", model, *rest])
    error = capsys.readouterr().err
    assert code == 3, error
    ways = list(_ways(error).values())
    assert ways, error
    option, _ = ways[0]
    changed = dict(zip(rest[::2], rest[1::2], strict=True)) | _options(option, tmp_path / "lora")
    code = _exit_code(APP, ["advise", model, *(part for pair in changed.items() for part in pair)])
    assert code == 0, (option, capsys.readouterr().err)


def test_what_there_was_no_time_for_is_named(capsys, monkeypatch):
    monkeypatch.setattr("shardwright_search.advise.ways_out._LIMIT_S", 0.0)
    code, _, error = _advise(capsys, "llama-3-70b", "--gpus", "8:A100-40", "--batch", 8)
    assert code == 3 and not _ways(error)
    assert "not decided in the 0 CPU seconds for this: --parameters bfloat16, --optimizer adamw-8bit, " in error


def test_a_device_that_has_no_rate_of_a_format_is_refused_with_one_that_it_has(capsys):
    for precision in ((), ("--precision", "fp8")):
        asked = ("llama-3.2-1b", "--gpus", "4:V100-32", "--batch", 4, "--seq", 256, "--uniform", *precision)
        code, _, error = _advise(capsys, *asked)
        assert code == 2 and error.endswith(" products of V100-32: take float16\n")
        assert _advise(capsys, *asked, "--precision", "float16")[0] == 0
