"""Answers for clusters that nobody has measured: whether a model fits, the best plan, and other choices."""
