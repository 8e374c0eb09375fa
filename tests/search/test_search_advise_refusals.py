"""What `advise` leaves behind where it has no answer, and whether what it says to do helps."""

import re

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
    assert (code, told) == (3, "") and "no plan that DeepSpeed runs fits" in error
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "deepspeed.json").write_text("of the user")
    code, told, error = _advise(capsys, *asked, tmp_path / "mine")
    assert (code, told) == (2, "")
    assert error == f"error: {tmp_path}/mine: is not empty: choose a new folder, or remove what is in it\n"
    assert (tmp_path / "mine" / "deepspeed.json").read_text() == "of the user"


def _ways(error):
    """The options of each way out that is said to fit, by what it is."""
    found = re.findall(
        r"^  (--\S+ \S+|without --uniform)(?: \((.*?)\))?: fits, (?:at most )?([\d.]+) s a step", error, re.M
    )
    return {name or option: (option, float(step_s)) for option, name, step_s in found}


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
        "--budget-gib", "--gpus", "--parameters", "--optimizer", "--lora", "--seq", "--batch"
    }  # fmt: skip
    for option, step_s in ways.values():
        name, value = option.removeprefix("--").split()
        if name == "lora":
            continue
        code, answer, _ = told(**{name.replace("-", "_"): value})
        assert code == 0 and f"predicted {step_s:.4g} s a step" in answer, option
    budget = float(re.search(r"--budget-gib (\S+): fits", error)[1])
    assert told(budget_gib=round(budget - 0.01, 2))[0] == 3


def test_what_brings_too_little_or_is_refused_is_said_to(capsys):
    code, _, error = _advise(capsys, "llama-3-70b", "--gpus", "1:RTX-4090", "--batch", 1)
    assert code == 3 and not _ways(error)
    assert "--gpus 43x1:RTX-4090: not possible: --inter-node-gbit-s" in error
    assert "--seq 1024 (shorter samples): still exceeds the budget by" in error


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
