"""What a step holds and how it is counted: shared by the cost model, which prices plans, and the solver."""
