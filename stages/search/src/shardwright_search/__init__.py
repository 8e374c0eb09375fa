"""Finds the plan that trains a model fastest on a cluster within a memory budget, and explains it."""
