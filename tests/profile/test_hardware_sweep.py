import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked_command import PROFILE, Command, forked_command
from launchers import by_address, by_slurm
from rest_long import rest_long

from shardwright.io import write_document
from shardwright.io.table import Row, Table
from shardwright.launch.ranks import launch
from shardwright.types import Cluster
from shardwright.types.hardware_profile import Collective, HardwareProfile, read_hardware_profile

_RATES = {"matrix_flops_per_s", "memory_bytes_per_s"}
_LAYERS = {"layers_alone_per_s", "layers_in_pipeline_per_s"}
_ONE_MIB = 1024 * 1024


def _start(folder: Path, *arguments: object, **variables: str) -> Command:
    return forked_command(["hardware", *arguments], {"TMPDIR": str(folder)} | variables, package=PROFILE)


def _as_users_do(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from shardwright_profile.cli import main; main()", "hardware"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def _start_long_sweep(folder: Path, cluster: Cluster) -> Command:
    write_document(folder / "cluster.json", cluster)
    return _start(folder, "--cluster", folder / "cluster.json", "--time-budget", 60, "--out", folder / "hardware.h5")


def test_two_ranks_measure_every_kind_of_message_to_one_mebibyte(make_cluster, tmp_path):
    write_document(tmp_path / "cluster.json", make_cluster((1, 2)))
    out = tmp_path / "made" / "hardware.h5"
    finished = _as_users_do("--cluster", tmp_path / "cluster.json", "--time-budget", 0.5, "--out", out)
    progress = finished.stderr
    assert finished.returncode == 0, progress
    profile = read_hardware_profile(out)
    assert (profile.cluster, profile.device, profile.backend) == ("toys", "cpu", "gloo")
    assert {key.collective for key in profile.curves} == set(Collective)
    for key, (sizes, medians_s) in profile.curves.items():
        assert key.group == (2, 2, True)
        assert sizes.tolist()[:6] == [1024 * 4**i for i in range(6)]
        assert sizes[5] == _ONE_MIB
        assert (medians_s > 0).all()
        # A mebibyte moves no faster than memory does.
        assert _ONE_MIB / medians_s[5] < 1e12
    repeats = np.bincount(profile.repeats["point"])
    assert repeats.min() >= 6
    assert repeats.max() <= 100
    assert {name.decode() for name in profile.rates["name"]} == {*_RATES, *_LAYERS, "startup_s"}
    lines = progress.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["1/12 devices", "1/12 devices", "1/12 layers", "hardware"]
    # What is measured whatever the budget: points, a pair at two sizes, overlap at three.
    assert re.match(
        r"hardware: 30 points, 2 rounds of pairs, 12 overlaps, at least 6 repeats each: about [\d.e+]+ s needed, "
        r"0.5 s given(: the small sizes are timed all the same)?$",
        lines[3],
    )
    assert lines[4].startswith("2/12 all_gather of 2 consecutive ranks in a node: 1 KiB in ")
    assert len([line for line in lines if not line.startswith("note: ")]) == 4 + len(repeats) + 2 + 12
    assert profile.provenance.notes.splitlines() == [line[6:] for line in lines if line.startswith("note: ")]
    _check_what_else_is_in_it(profile)
    assert [path.name for path in out.parent.iterdir()] == ["hardware.h5"]


def _check_what_else_is_in_it(profile: HardwareProfile) -> None:
    assert profile.ranks["rank"].tolist() == [0, 1] * len(_RATES | _LAYERS)
    slowest = {name.decode(): value for name, value in zip(profile.rates["name"], profile.rates["value"], strict=True)}
    assert all(1 < slowest[name] < 1e6 for name in _LAYERS)
    for name in _RATES:
        assert slowest[name] == profile.ranks["value"][profile.ranks["name"] == name.encode()].min()
        assert 1e8 < slowest[name] < 1e13
    assert 0.1 < slowest["startup_s"] < 60
    pairs, overlap = profile.pairs, profile.overlap
    assert (pairs["source_rank"].tolist(), pairs["target_rank"].tolist()) == ([0, 0], [1, 1])
    assert pairs["message_bytes"].tolist() == [1024, _ONE_MIB]
    assert ((pairs["time_s"] > 1e-7) & (pairs["time_s"] < 1)).all()
    kinds = sorted({(name.decode(), int(size)) for name, size in zip(*_columns(overlap, 2), strict=True)})
    assert kinds == [("all_gather", 2), ("all_reduce", 2), ("p2p", 2), ("reduce_scatter", 2)]
    for name in (b"all_gather", b"all_reduce", b"p2p", b"reduce_scatter"):
        rows = overlap["collective"] == name
        assert sorted(overlap["collective_bytes"][rows]) == sorted([4096, 65536, _ONE_MIB] * 3)
    assert len(set(overlap["compute_s"].tolist())) == len(overlap["compute_s"])
    medians = {
        (key.collective.value, int(size)): time_s
        for key, (sizes, times_s) in profile.curves.items()
        for size, time_s in zip(sizes, times_s, strict=True)
    }
    for name, size, time_s in zip(
        *(overlap[c] for c in ("collective", "collective_bytes", "collective_s")), strict=True
    ):
        # The same message, timed in two ways on a machine that does other things too.
        assert 0.02 < time_s / medians[name.decode(), int(size)] < 50


def _columns(table: Table[Row], count: int) -> list[np.ndarray]:
    return list(table.columns.values())[:count]


def test_a_repeat_takes_as_long_as_on_the_slowest_rank_and_all_ranks_agree(tmp_path):
    code = """
import sys, time, os, torch, torch.distributed as dist
from shardwright_profile.hardware.session import Stopwatch
from datetime import timedelta
from shardwright.launch.store import rank_store
store = rank_store(dist.FileStore, dist.Store, 2, timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
rank, stopwatch = dist.get_rank(), Stopwatch(torch.device("cpu"))
times_s = stopwatch.slowest_s(lambda: time.sleep(0.05 * rank), 3)
open(sys.argv[1] + str(rank), "w").write(f"{times_s.tolist()} {stopwatch.agreed(float(rank))}")
dist.barrier()
dist.destroy_process_group()
"""
    launch([sys.executable, "-c", code, f"{tmp_path}/said"], range(2), 2)
    first, second = ((tmp_path / f"said{rank}").read_text() for rank in (0, 1))
    assert first == second
    times, largest = first.rsplit(" ", 1)
    assert float(largest) == 1.0
    assert len(json.loads(times)) == 3
    assert min(json.loads(times)) >= 0.05


@pytest.mark.parametrize("place", rest_long(1, (by_address, by_slurm)))
def test_two_launchers_of_one_rank_each_measure_across_nodes(make_cluster, tmp_path, place):
    write_document(tmp_path / "cluster.json", make_cluster((2, 1)))
    launchers = []
    for node, (options, environment) in enumerate(place(2, tmp_path)):
        given = ("--cluster", tmp_path / "cluster.json", "--time-budget", 0.1, "--max-bytes", 4096, *options)
        environment |= {"SHARDWRIGHT_SECRET": "0123456789abcdef" * 2}  # for each has an output of its own
        launchers.append(_start(tmp_path, *given, "--out", tmp_path / f"{node}.h5", **environment))
    for launcher in launchers:
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, errors
    profile = read_hardware_profile(tmp_path / "0.h5")
    assert {key.group.across_nodes for key in profile.curves} == {True}
    assert not (tmp_path / "1.h5").exists()


def test_a_killed_rank_ends_the_others_and_is_named(make_cluster, tmp_path):
    sweep = _start_long_sweep(tmp_path, make_cluster((1, 2)))
    sweep.until_said("1/12 devices", 60)  # the ranks have met
    os.kill(sweep.ranks()[1][0], signal.SIGKILL)
    _, errors = sweep.communicate(timeout=300)
    assert sweep.returncode == 4
    line = r"error: rank 1: was killed by SIGKILL (timing|measuring|before) .*: the other ranks were ended"
    assert re.fullmatch(line, errors.splitlines()[-1])
    assert sweep.ranks() == {}
    assert not (tmp_path / "hardware.h5").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_ranks_in_order(make_cluster, tmp_path, number):
    sweep = _start_long_sweep(tmp_path, make_cluster((1, 2)))
    _wait_for_ranks(sweep, 2)
    sweep.send_signal(number)
    _, errors = sweep.communicate(timeout=300)
    assert sweep.returncode == 75
    assert re.fullmatch(r"error: stopped .*: run the same command again", errors.splitlines()[-1])
    assert sweep.ranks() == {}
    assert {path.name for path in tmp_path.iterdir()} <= {"cluster.json", "hardware.h5.journal"}


def test_ranks_end_when_their_launcher_is_killed(make_cluster, tmp_path):
    sweep = _start_long_sweep(tmp_path, make_cluster((1, 1)))
    _wait_for_ranks(sweep, 1)
    sweep.kill()
    sweep.communicate(timeout=300)
    until = time.monotonic() + 90
    while sweep.ranks() and time.monotonic() < until:
        time.sleep(0.1)
    assert sweep.ranks() == {}


def _wait_for_ranks(sweep: Command, count: int) -> None:
    until = time.monotonic() + 90
    while len(sweep.ranks()) < count:
        assert time.monotonic() < until, "the ranks were not started"
        time.sleep(0.05)
