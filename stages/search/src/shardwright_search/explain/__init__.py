"""Why a plan: its terms by pipeline stage, what binds, and what the runners-up would cost."""

from shardwright_search.explain.tables import explanation, plan_summary, show
from shardwright_search.explain.wording import layer_runs, strategy_words

__all__ = ["explanation", "layer_runs", "plan_summary", "show", "strategy_words"]
