"""Exit codes, and one line whatever is in it."""

import pytest

from shardwright.io import BadInput, NothingFits, RunFailed, ShardwrightError, Stopped, one_line_errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("plan.json", "is empty", "write it again"), 2),
        (NothingFits("12 bytes are missing"), 3),
        (RunFailed("the loss is NaN in step 3"), 4),
        (Stopped("stopped after step 3"), 75),
    ],
)
def test_an_error_ends_in_one_line_and_its_exit_code(
    error: ShardwrightError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise error
    assert stop.value.code == code
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


def test_bad_input_names_file_fault_and_remedy_on_one_line() -> None:
    assert str(BadInput("a\nb.json", "two\n lines", "mend\tit")) == "a b.json: two lines: mend it"


def test_bad_input_prints_no_control_characters_of_a_hostile_file() -> None:
    assert str(BadInput("a.json", "key \x1b[31m\x00\u202e", "mend it")) == "a.json: key ?[31m??: mend it"


def test_bad_input_does_not_repeat_a_giant_value() -> None:
    assert len(str(BadInput("a.json", "x" * 1_000_000, "mend it"))) < 1100


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError
