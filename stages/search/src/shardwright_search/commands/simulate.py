"""The command that shows a plan's simulated step."""

import json
from contextlib import ExitStack

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright_formats.display.svg import document
from shardwright_formats.display.timeline import draw_timeline, idle_s
from shardwright_formats.io import BadInput, atomic_path, read_document
from shardwright_formats.types import Estimate, Plan
from shardwright_search.commands.inputs import read_inputs
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.explain.tables import node_types_table, show_rich, table
from shardwright_search.options import SimulateOptions
from shardwright_search.simulation.chrome_trace import chrome_trace

_KINDS = ("forward", "backward", "gradient_sync", "optimizer")


def simulate_plan(options: SimulateOptions) -> None:
    """Show the simulated step, and write its picture and its trace where they are asked for."""
    plan, profiles = read_document(options.plan, Plan), read_inputs(options).profiles
    costs = cost_model_of(plan, profiles, options.time_model)
    try:
        estimate = evaluate(plan, profiles, costs, sends=options.sends).estimate
    except ValueError as error:
        raise BadInput(options.plan, str(error), "simulate asynchronous sends, or choose 1f1b or gpipe") from None
    files = {}
    if options.svg is not None:
        files[options.svg] = document(draw_timeline(plan, estimate))
    if options.trace is not None:
        files[options.trace] = json.dumps(chrome_trace(plan, estimate), ensure_ascii=False)
    with ExitStack() as stack:  # Each file is complete before the first gets its name.
        for path, content in files.items():
            stack.enter_context(atomic_path(path)).write_text(content, encoding="utf-8")
        show_rich(_report(plan, estimate))


def _report(plan: Plan, estimate: Estimate) -> RenderableType:
    """The step's times, and what each pipeline stage does with the time until the last event."""
    end_s = max(event.end_s for event in estimate.timeline)
    step_ms, bound_ms, closed_ms, end_ms = (
        f"{time_s * 1e3:.3f} ms"
        for time_s in (
            estimate.simulated_step_time_s,
            estimate.simulated_lower_bound_s,
            estimate.objective_s,
            end_s,
        )
    )
    line = (
        f"plan {plan.name}: {plan.schedule}, {len(plan.stages)} pipeline stage(s), {plan.num_microbatches} microbatches"
    )
    step = f"simulated step {step_ms}, lower bound {bound_ms}, closed form {closed_ms}"
    headings = ("stage", *(kind.replace("_", " ") for kind in _KINDS), "idle", "idle share")
    rows = [_stage_row(estimate, stage, end_s) for stage in range(len(plan.stages))]
    title = f"ms until {end_ms}, when the last stage is done"
    types = node_types_table(plan, estimate)
    return Group(Text(f"{line}\n{step}"), table(title, headings, rows), *([] if types is None else [types]))


def _stage_row(estimate: Estimate, stage: int, end_s: float) -> list[str]:
    own = [event for event in estimate.timeline if event.stage == stage]
    sums_s = [sum(event.end_s - event.start_s for event in own if event.kind == kind) for kind in _KINDS]
    idle = idle_s(own, stage, end_s)
    return [f"{stage:>5}", *(f"{time_s * 1e3:.3f}" for time_s in (*sums_s, idle)), f"{idle / end_s:.1%}"]
