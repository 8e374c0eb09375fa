"""The `shardwright` command, which dispatches to the programs of its stages."""
