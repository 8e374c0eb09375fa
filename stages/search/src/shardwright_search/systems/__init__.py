"""Systems that run plans: an entry each, which searches, exports, readers and the accuracy benchmark read."""
