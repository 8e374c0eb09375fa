"""Parallelism inside a pipeline stage: process groups, collectives, and sharding along every axis."""
