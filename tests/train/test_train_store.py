"""The store that the ranks of several nodes find one another by is to PyTorch what its own are."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launchers import met

from shardwright.launch.exchange import exchange
from shardwright.launch.heartbeat import RankFiles
from shardwright.launch.store import note_meeting, rank_store

CALLS = [
    ("set", "a", "1"), ("get", "a"), ("add", "n", 3), ("add", "n", -1), ("get", "n"), ("check", ["a", "n"]),
    ("check", ["a", "none"]), ("compare_set", "a", "2", "3"), ("compare_set", "a", "1", "3"), ("get", "a"),
    ("compare_set", "new", "x", "y"), ("compare_set", "new", "", "y"), ("delete_key", "n"), ("delete_key", "n"),
    ("num_keys",), ("wait", ["a"]),
]  # fmt: skip


def test_the_store_of_several_nodes_does_what_pytorchs_own_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RankFiles.of_rank(tmp_path, 0)
    monkeypatch.setenv("SHARDWRIGHT_RANK_FILES", str(files.beginning))
    with met(2) as (first, _), exchange(first, "4") as line:
        assert line.place is not None
        note_meeting(files.meeting_file, line.place, line.launch)
        assert files.meeting_file.stat().st_mode & 0o777 == 0o600
        one, other = (rank_store(dist.FileStore, dist.Store, 2, timedelta(seconds=20)) for _ in range(2))
        seen: list[bytes] = []
        waiting = threading.Thread(target=lambda: seen.append(one.get("late")))
        waiting.start()
        own = dist.HashStore()
        assert _answers(other) == _answers(own)
        # Through C++, as process groups call it; by a line of its own that several threads may share.
        assert _answers(dist.PrefixStore("p", other)) == _answers(dist.PrefixStore("p", own))
        assert dist.PrefixStore("q", other).clone().check(["late"]) is False
        other.set("late", b"\x00\xff")
        waiting.join(20)
        assert seen == [b"\x00\xff"]


def _answers(store: Any) -> list[object]:
    calls: list[tuple[Callable[..., object], list[object]]] = [(getattr(store, name), rest) for name, *rest in CALLS]
    return [call(*arguments) for call, arguments in calls]
