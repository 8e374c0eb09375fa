"""The commands of shardwright-search."""
