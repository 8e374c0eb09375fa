"""Estimates of time and memory of models on devices and clusters, from shapes and published figures only."""
