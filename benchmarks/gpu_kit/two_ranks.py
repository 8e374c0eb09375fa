"""S6: two ranks on one device over gloo: the arithmetic of distributed plans in float64, with the device's kernels."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

from gpu_kit.configurations import configuration
from gpu_kit.rows import Row, Values
from gpu_kit.setting import Setting
from gpu_kit.several import FLOAT64, REFERENCE, TOLERANCE, compared, plans_of, row_of
from gpu_kit.steps import launch_ranks
from gpu_kit.workbench import described, plan_of
from harness import table
from msgspec.structs import replace

from shardwright.types import ContextParallel, ExpertStrategy, Plan, Strategy
from shardwright_train.parallel.world import World

RANKS = 2
_EXPERTS, _EXPERTS_REFERENCE = "experts on 2 ranks", "data parallel, experts"


def plans(setting: Setting) -> dict[str, Plan]:
    """Return the plans that are tried, including the references, in the same order on all ranks."""
    width, layers, vocabulary, length = setting.size((256, 4, 1024, 128), (32, 4, 61, 16))
    model = described(configuration("llama", width, layers, vocabulary, length), "two-ranks", length)
    fields: dict[str, Any] = {"precision": FLOAT64, "attention": "eager"}
    found = plans_of(setting, model, RANKS, **fields)
    shared = plan_of(
        setting, model, Strategy(tp_size=1, cp_size=2, dp_size=1), name="context of 2, gathered", num_microbatches=1,
        global_batch_size=found[REFERENCE].global_batch_size, **(fields | {"attention": "sdpa_math"}),
    )  # fmt: skip
    layers_ = tuple(replace(layer, context=ContextParallel.GATHER) for layer in shared.layers)
    sparse = described(configuration("qwen3_moe", width, layers, vocabulary, length), "two-ranks-experts", length)
    whole = plan_of(
        setting, sparse, Strategy(tp_size=1, dp_size=2), name=_EXPERTS_REFERENCE, num_microbatches=1,
        global_batch_size=8, **fields,
    )  # fmt: skip
    split = tuple(replace(layer, experts=ExpertStrategy(ep_size=2)) for layer in whole.layers)
    more = (replace(shared, layers=layers_), whole, replace(whole, name=_EXPERTS, layers=split))
    return found | {plan.name: plan for plan in more}


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return a row for each plan; all are run in one launch."""
    launched = cache(lambda: launch_ranks(setting, "two_ranks", RANKS, setting.size(55, 300), one_device=True))
    return [Row(name, partial(row_of, name, launched)) for name in plans(setting)]


def of_rank(setting: Setting, world: World) -> dict[str, Values]:
    """Return the losses, norms and times of every plan on this rank."""
    return compared(
        setting, world, plans(setting), {_EXPERTS: _EXPERTS_REFERENCE, _EXPERTS_REFERENCE: _EXPERTS_REFERENCE}
    )


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of this step's report."""
    told = [
        [name, f"{row['difference']:.1e}", "yes" if row["well"] else "**no**", f"{row['last_step_s'] * 1000:.0f}"]
        for name, row in rows.items()
    ]
    said = f"Losses and gradient norms in float64 must be those of plain data parallelism to {TOLERANCE:.0e}."
    return [said, "", *table("plan|largest difference|well|last step, ms", told)]
