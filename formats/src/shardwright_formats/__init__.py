"""The contract between Shardwright's stages: typed values, strict reading, atomic writing, and the meaning of a plan."""
