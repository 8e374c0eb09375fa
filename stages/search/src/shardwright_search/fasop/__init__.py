"""FASOP's search space: its candidates, their estimates, their exact partitions, and a table of all."""
