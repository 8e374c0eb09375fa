"""Layers that wait for their host are told where they are scaled in proportion."""

from shardwright_profile.importers.galvatron.model import import_galvatron

_WAITING = {
    f"layernum[{layers}]_bsz{batch}_seq32": layers * (1.7 + 0.01 * batch) + 3 for layers in (2, 4) for batch in (1, 2)
}
"""Layers that take 1.71 and 1.72 ms at batch 1 and 2, as Galvatron's blocks of BERT do."""


def _notes(request):
    return [line for line in import_galvatron(request).provenance.notes.splitlines() if line.startswith("launch-bound")]


def test_layers_that_wait_for_their_host_are_told_where_they_are_scaled(request_for, hardware):
    (told,) = _notes(request_for(times=_WAITING, micro_batch_sizes=(1, 2, 8)))
    assert told == (
        "launch-bound: block takes 49 us for each of about 35 kernels (micro_batch_size 1 to 2, tp_size 1, "
        "sequence_length 32), about what a host takes to start one. In proportion to it, larger micro-batches are too "
        "slow."
    )
    (told,) = _notes(request_for(times=_WAITING, tp_sizes=(1, 2), hardware=hardware))
    assert told.endswith("larger micro-batches are too slow and larger tp_sizes too fast.")


def test_layers_that_compute_and_those_that_are_not_scaled_are_not_told(request_for):
    assert not _notes(request_for(micro_batch_sizes=(1, 2, 4, 8))), "86 us a kernel and more"
    assert not _notes(request_for(times=_WAITING))
