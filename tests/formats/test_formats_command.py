"""The front door of all commands."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_calls import call
from front_door import APP, FailOptions, Schedule, WriteOptions

from shardwright.command import Options
from shardwright.command.options import options_of
from shardwright.types import Count


def test_options_reach_the_command_as_its_struct(tmp_path):
    out = tmp_path / "out"
    wanted = WriteOptions(
        plans=(Path("a"), Path("b"), Path("c")),
        out=out,
        an_option_with_quite_a_long_name_that_nobody_should_cut=3,
        time_limit=2.5,
        schedule=Schedule.GPIPE,
        dtype="bfloat16",
        model=(Path("x"), Path("y")),
        consecutive=False,
        tables=False,
        name="null",
    )
    spelled = "--an-option-with-quite-a-long-name-that-nobody-should-cut=3 --time-limit 2.5 --schedule gpipe b"
    more = "--dtype bfloat16 --model x --model y --strided --no-tables --name null c"
    called = call(APP, "write", "a", "--out", out, *spelled.split(), *more.split())
    assert called == (0, "out\n", "")
    assert out.read_text() == repr(wanted)


@pytest.mark.parametrize("more", [["--again"], ["--again", "out"], ["out", "--again"]])
def test_an_argument_by_place_may_be_left_out_or_stand_behind_options(more):
    out = Path("out") if "out" in more else None
    wanted = FailOptions(how="nothing", out=out, again=True)
    assert call(APP, "import", "fail", "nothing", *more) == (0, f"{wanted!r}\n", "")


def test_what_is_not_given_takes_the_default_of_the_struct(tmp_path):
    assert call(APP, "write", "a", "--out", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out").read_text() == repr(WriteOptions(plans=(Path("a"),), out=tmp_path / "out"))


LONG = "--an-option-with-quite-a-long-name-that-nobody-should-cut"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([LONG, "0"], "a whole number at least 1 and at most 2,147,483,647"),
        ([LONG, "2.5"], "give a whole number"),
        ([LONG, "1e300"], "give a whole number"),
        ([LONG, "9" * 5000], "give a whole number"),
        ([LONG, "nan"], "give a whole number"),
        ([LONG, "ten"], "'ten' is out of range or not a value"),
        (["--time-limit", "inf"], "give a number at least 0 and at most 1,000,000,000"),
        (["--time-limit", "nan"], "give a number"),
        (["--time-limit", "1e300"], "give a number"),
        (["--time-limit", "-1"], "give a number"),
        (["--time-limit", ""], "'' is empty"),
        (["--time-limit"], "expected one argument"),
        (["--schedule", "ONE_F_ONE_B"], "give one of gpipe, 1f1b"),
        (["--dtype", "int8"], "give one of float32, bfloat16"),
        (["--name", "a\udcffb"], "not UTF-8"),
        (["--time", "3"], "--time"),
        (["--unknown\nsecond"], "--unknown second"),
        (["--out", "x" * 300], "File name too long: choose a shorter name"),
        (["--out", "/proc/nowhere/out"], "No such file"),
        (["--out", "."], "is a folder"),
        (["--out", "/"], "'/' has no name: name a file or a folder in it"),
        (["--name", "a\nb"], "contains a control character"),
        (["--name", "a\x1b[31m"], "contains a control character"),
        (["--model", "a\u202eb"], "contains a control character"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    called = call(APP, "write", "a", "--out", "out", *arguments)
    assert (called.exit_code, called.stdout) == (2, "")
    assert called.stderr.startswith("error: ") and called.stderr.count("\n") == 1
    assert told in called.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["write", "a"], ["write", "--out", "x"], ["nothing"], ["import", "nothing"], ["wri"]]
)
def test_what_is_missing_or_unknown_is_one_line(arguments):
    called = call(APP, *arguments)
    assert (called.exit_code, called.stdout) == (2, "")
    assert called.stderr.count("\n") == 1 and "--help" in called.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["b", "a", "--out", "a"], "--out: a is PLANS, too"),
        (["b", "--out", "folder/../a", "--model", "a"], "--out: folder/../a is --model, too"),
        (["b", "--model", "a", "--model", "link", "--out", "a"], "--out: a is --model, too"),
    ],
)
def test_an_input_is_not_replaced_by_what_is_written(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("a")
    called = call(APP, "write", *arguments)
    assert called == (2, "", f"error: {told}: choose another file\n")
    assert (tmp_path / "a").read_text() == "mine"


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "device").symlink_to("/dev/full")  # a mistake must replace the link, never the machine's own
    called = call(APP, "write", "a", "--out", tmp_path / "device")
    assert called.exit_code == 2 and "is not a regular file" in called.stderr
    assert (tmp_path / "device").is_symlink()


def test_a_full_disk_leaves_no_half_file(tmp_path):
    called = call(APP, "import", "fail", "full", tmp_path / "out")
    fault = "No space left on device: make room, or choose another place"
    assert called == (2, "", f"error: {tmp_path / 'out'}: {fault}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("how", "exit_code"), [("memory", 2), ("nothing", 3), ("interrupt", 130)])
def test_each_way_to_end_has_its_exit_code(how, exit_code):
    called = call(APP, "import", "fail", how)
    assert called.exit_code == exit_code
    assert called.stderr.count("\n") == (how != "interrupt")


def test_an_error_of_our_own_making_is_not_hidden():
    with pytest.raises(ValueError, match="a bug"):
        call(APP, "import", "fail", "bug")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["import", "--help"]])
def test_the_overview_names_the_commands(arguments):
    called = call(APP, *arguments)
    assert called.exit_code == 0 and "import fail" in called.stdout and "Try the front door." in called.stdout


@pytest.mark.parametrize("arguments", [[], ["import"]])
def test_without_a_command_there_is_the_overview_but_no_success(arguments):
    called = call(APP, *arguments)
    assert called.exit_code == 2 and "import fail" in called.stdout


@pytest.mark.parametrize("file", ["/dev/zero", "."])
def test_a_batch_is_a_regular_file(file):
    assert "file" in call(APP, "batch", file).stderr


def test_help_cuts_no_name_and_tells_limits_defaults_and_meanings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = call(APP, "write", "--help")
    assert told.exit_code == 0
    for words in (
        LONG,
        "--strided",
        "--no-tables",
        "{gpipe,1f1b}",
        "default 1f1b",
        "Where to.",
        "100 % plain",
        "or 100 % of them",
        "Neighb",
    ):
        assert words in told.stdout
    assert "at least 1 and at most 2,147,483,647" in " ".join(told.stdout.split())
    assert max(map(len, told.stdout.splitlines())) <= 80


def test_a_number_without_limits_is_no_option():
    class Loose(Options, frozen=True, kw_only=True):
        batch_size: int

    with pytest.raises(TypeError, match="has no limits"):
        list(options_of(Loose))

    class Narrow(Options, frozen=True, kw_only=True):
        batch_size: Count

    assert [option.name for option in options_of(Narrow)] == ["--batch-size"]


def _shell(command, tmp_path):
    line = f"{sys.executable} {Path(__file__).with_name('front_door.py')} {command}"
    return subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "2>&-"])
def test_a_stream_that_takes_nothing_is_no_success(tmp_path, redirection):
    ended = _shell(f"write a --out out {redirection}", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == (redirection != "2>&-") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "exit_code"), [("write a --out out", 141), ("--help", 141), ("write a", 2)])
def test_a_command_ends_quietly_where_nobody_reads_what_it_says(tmp_path, unread, arguments, exit_code):
    """As `head -1` leaves it, of both streams; what is wrong with a command stays its exit code."""
    command = [sys.executable, Path(__file__).with_name("front_door.py"), *arguments.split()]
    alone = subprocess.run(command, cwd=tmp_path, stdout=unread, stderr=subprocess.PIPE, timeout=300)
    assert (alone.returncode, alone.stderr.count(b"\n")) == (exit_code, exit_code == 2)
    assert subprocess.run(command, cwd=tmp_path, stdout=unread, stderr=unread, timeout=300).returncode == exit_code
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_one_line_and_leaves_no_folder(tmp_path):
    ended = _shell(f"write {'a ' * 2000} --out out", tmp_path)
    assert ended.returncode == 0
    (tmp_path / "out").unlink()
    program = f"{sys.executable} {Path(__file__).with_name('front_door.py')}"
    line = f"ulimit -f 1; {program} write {'a ' * 2000} --out new/folders/out"
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "out" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_batch_runs_the_commands_of_a_file_in_order_until_one_fails(tmp_path):
    names = ("a", "b 'c", "d")
    lines = [f"write p --out {shlex.quote(str(tmp_path / name))}  # as a shell would" for name in names]
    (tmp_path / "all").write_text("\n".join([lines[0], "", lines[1], "import fail nothing", lines[2]]))
    called = call(APP, "batch", tmp_path / "all")
    assert (called.exit_code, called.stdout) == (3, "a\nb 'c\n")
    assert [(tmp_path / name).exists() for name in names] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("write 'p", "line 2: No closing quotation: quote as for a shell"),
        ("batch all", "line 2: a batch cannot contain another batch"),
        ("rite p", "there is no command 'rite p'"),
    ],
)
def test_a_line_of_a_batch_that_is_no_command_is_told(tmp_path, line, told):
    (tmp_path / "all").write_text(f"# all\n{line}\n")
    called = call(APP, "batch", tmp_path / "all")
    assert called.exit_code == 2 and told in called.stderr and len(called.stderr.splitlines()) == 1
