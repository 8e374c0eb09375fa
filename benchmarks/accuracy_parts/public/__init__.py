"""Measured runs that others published, predicted with analytic profiles."""
