"""The contract between Shardwright's stages: typed values, strict reading, atomic writing, a plan's meaning."""
