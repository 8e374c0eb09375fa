"""The sharing of a layer by the ranks of a pipeline stage: groups, collectives, shards and vocabularies."""
