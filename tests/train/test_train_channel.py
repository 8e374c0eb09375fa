"""Ranks exchange values and errors as JSON, whatever their lengths."""

from forked_ranks import run_worker


def test_every_rank_hears_the_same_in_the_order_of_the_ranks() -> None:
    run_worker("channel_worker", [], 3)
