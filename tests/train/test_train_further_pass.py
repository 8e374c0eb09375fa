"""Kinds of passes that the runtime runs, and one that it does not."""

from types import SimpleNamespace

import pytest

from shardwright.plan.schedules.passes import Pass
from shardwright_train.pipeline.runner import _Passes


def test_the_runtime_runs_every_kind_of_pass_and_refuses_another_by_name():
    methods = SimpleNamespace(forward="forward", backward="backward", weight="weight")
    assert [_Passes.of_kind(methods, kind) for kind in Pass] == [str(kind) for kind in Pass]
    with pytest.raises(ValueError, match="does not run passes of kind later"):
        _Passes.of_kind(methods, str.__new__(Pass, "later"))
