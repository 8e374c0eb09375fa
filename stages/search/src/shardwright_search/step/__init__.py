"""The memory of a step, and Pareto filters: used by the cost model and by the solver."""
