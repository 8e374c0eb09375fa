"""The launcher: starts the ranks of a run on one or several nodes, watches them, and reports which failed first."""
