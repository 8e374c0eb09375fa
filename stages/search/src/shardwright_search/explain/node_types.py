"""Node types of a mixed cluster as a table."""

from rich.table import Table

from shardwright_formats.display.node_types import binding, node_type_uses
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate
from shardwright_search.explain.tables import table


def node_types_table(plan: Plan, estimate: Estimate) -> Table | None:
    """One row for each node type; None where there is one only."""
    uses = node_type_uses(plan, estimate)
    if not uses:
        return None
    binds = binding(uses).name
    headings = ("node type", "stages", "ranks", "busiest stage", "idle share", "idle USD a step")
    rows = [
        [
            f"{use.name} (binds)" if use.name == binds else use.name,
            f"{use.stages}",
            f"{use.ranks}",
            f"{use.busiest_s * 1e3:.3f}",
            f"{use.idle_share:.1%}",
            "no price" if use.idle_usd is None else f"{use.idle_usd:.6f}",
        ]
        for use in uses
    ]
    return table("node types, times in ms", headings, rows)
