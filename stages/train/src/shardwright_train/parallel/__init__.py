"""How the ranks of a pipeline stage share a layer: groups, collectives, shards and vocabularies."""
