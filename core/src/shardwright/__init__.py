"""The one command of Shardwright, which hands on to the programs of its stages."""
