"""What `advise` leaves behind where it has no answer, and whether what it says to do helps."""

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


def test_what_a_line_says_to_take_fits_once_it_is_taken(capsys):
    """A batch of one sample cannot be smaller, and of 70 B parameters states alone are too many for a GPU."""
    asked = ("llama-3.2-1b", "--gpus", "1:A100-80", "--budget-gib", 68.8, "--uniform", "--batch", 2, "--seq", 131072)
    code, _, error = _advise(capsys, *asked)
    assert code == 3 and error.endswith(" GiB, --batch 1, --seq 65536\n")
    assert [_advise(capsys, *asked, *more)[0] for more in (("--batch", 1), ("--seq", 65536))] == [0, 0]
    code, _, error = _advise(capsys, "llama-3-70b", "--gpus", "1:RTX-4090", "--batch", 1)
    assert code == 3 and "--batch" not in error and "--seq" not in error
    for precision in ((), ("--precision", "fp8")):
        asked = ("llama-3.2-1b", "--gpus", "4:V100-32", "--batch", 4, "--seq", 256, "--uniform", *precision)
        code, _, error = _advise(capsys, *asked)
        assert code == 2 and error.endswith(" products of V100-32: take float16\n")
        assert _advise(capsys, *asked, "--precision", "float16")[0] == 0
