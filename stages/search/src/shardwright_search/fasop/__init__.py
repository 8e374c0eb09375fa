"""FASOP's search space and its estimate of it, with an exact partition: every candidate, and a table of all."""
