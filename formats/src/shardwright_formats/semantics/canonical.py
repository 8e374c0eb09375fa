"""A strategy without the choices that do nothing at its sizes."""

from shardwright_formats.types import DataParallel, SequenceParallel, Strategy


def effective(strategy: Strategy) -> Strategy:
    """The one spelling of what a layer's strategy does; a layer's type and recomputation are left out.

    One rank alone has no sequence to share and no neighbours, and parameters that one rank holds are not sharded; with
    Ulysses all ranks of the pipeline stage share them.
    """
    tp_size, dp_size = strategy.tp_size, strategy.dp_size
    sequence_parallel = strategy.sequence_parallel if tp_size > 1 else SequenceParallel.NONE
    shared = dp_size > 1 or sequence_parallel is SequenceParallel.ULYSSES
    return Strategy(
        tp_size=tp_size,
        tp_consecutive=strategy.tp_consecutive or tp_size == 1 or dp_size == 1,
        dp_size=dp_size,
        data_parallel=strategy.data_parallel if shared else DataParallel.DDP,
        shard_size=strategy.shard_size,
        sequence_parallel=sequence_parallel,
    )
