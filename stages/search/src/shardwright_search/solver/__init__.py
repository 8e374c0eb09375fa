"""The exact search over partition and strategies of one configuration: pipeline degree, microbatches, schedule."""
