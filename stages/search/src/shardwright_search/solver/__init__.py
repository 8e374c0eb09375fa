"""The exact search over partition and strategies of one case: pipeline degree, microbatches, schedule."""
