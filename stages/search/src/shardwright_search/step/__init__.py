"""The memory of a step, and columns of numbers: shared by the cost model, which prices plans, and the solver."""
