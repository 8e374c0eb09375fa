"""Ranks exchange values and errors as JSON, whatever their lengths."""

from pathlib import Path

from forked_ranks import run_worker


def test_every_rank_hears_the_same_in_the_order_of_the_ranks_and_unpickles_nothing(tmp_path: Path) -> None:
    run_worker("channel_worker", [str(tmp_path / "unpickled")], 3)
    assert list(tmp_path.iterdir()) == []
