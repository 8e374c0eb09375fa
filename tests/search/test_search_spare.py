"""The memory of an estimated device that searches leave free."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.types import GIB
from shardwright_search.space.budget import budgets_of, with_spare
from shardwright_search.space.search_space import space_of

FILE = Path("s.json")


def test_estimated_devices_keep_a_share_free_unless_a_budget_or_a_reserve_is_given(make):
    model, cluster, plain = make.model(), make.cluster(2), make.request()
    measured = make.profiles(model, cluster)
    points = {key: each._replace(sources=frozenset({("forward_s", "analytic")})) for key, each in
              measured.layers.items()}  # fmt: skip
    estimated = measured._replace(layers=points)
    (whole,) = budgets_of(plain, cluster, FILE).values()
    assert with_spare(plain, cluster, measured) == plain
    (left,) = budgets_of(with_spare(plain, cluster, estimated), cluster, FILE).values()
    assert left == pytest.approx(0.92 * whole, abs=2)
    for asked in (replace(plain, memory_gib=whole / GIB), replace(plain, reserve_gib=whole / GIB / 100)):
        assert with_spare(asked, cluster, estimated) == asked
    budgets = {space_of(plain, model, cluster, each, FILE).instance.request.memory_gib is None
               for each in (measured, estimated)}  # fmt: skip
    assert budgets == {True, False}
