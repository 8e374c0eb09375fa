"""Memory of layers from Galvatron's tables, or from the file's raw rows if a table is missing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.io.table import Source, Sourced
from shardwright.types import EMBEDDING, HEAD, MIB, SequenceParallel
from shardwright_profile.importers.documents import ABSENT
from shardwright_profile.importers.galvatron.keys import (
    ACTIVATION,
    CHECKPOINT,
    MODEL_STATES,
    PARAMETER_SIZE,
    Figures,
    Forward,
    Lengths,
    Memory,
    RankMemory,
)

_STALE = 0.01


class ModelMemory(NamedTuple):
    """The memory figures for one sequence length, all from one kind of the file's tables.

    Figures that the file does not have are absent.
    """

    sequence: bool
    """Whether the figures are from the tables with sequence parallelism, not from those without."""
    layers: Mapping[str, Figures]
    """Figures of a layer, by type."""
    ends: Figures
    """Figures of embedding and head together; half of them are given to each."""
    measured_tp_sizes: frozenset[int]
    """Values of tp_size with raw rows; at others Galvatron did not measure but halved: figures are marked assumed."""
    notes: tuple[str, ...]

    def parameters(self, name: str, tp_size: int) -> Sourced:
        """Return the bytes of a layer's float32 parameters on a rank: the measured whole divided by tp_size."""
        if name in (EMBEDDING, HEAD):
            return self._sourced(self.ends.get((MODEL_STATES, tp_size)), 8, tp_size)
        return self._sourced(self.layers.get(name, {}).get((PARAMETER_SIZE, 1)), tp_size)

    def activation(self, name: str, tp_size: int, *, recompute: bool) -> Sourced:
        """Return the bytes that a layer holds from forward to backward on one GPU, per sample of its tensor group.

        A recomputed layer holds only its input, which is split only with sequence parallelism.
        """
        if name in (EMBEDDING, HEAD):
            return self._sourced(self.ends.get((ACTIVATION, tp_size)), 2, tp_size)
        figures = self.layers.get(name, {})
        if recompute:
            return self._sourced(figures.get((CHECKPOINT, 1)), tp_size if self.sequence else 1)
        return self._sourced(figures.get((ACTIVATION, tp_size)), 1, tp_size)

    def _sourced(self, mib: float | None, parts: int, tp_size: int | None = None) -> Sourced:
        if mib is None:
            return ABSENT
        known = tp_size is None or tp_size in self.measured_tp_sizes
        return Sourced(mib * MIB / parts, Source.DERIVED if known else Source.ASSUMED)


def tables_of(memory: Memory, asked: SequenceParallel | None) -> bool:
    """Return whether to use the tables with sequence parallelism: as `asked`, else whether the file has them.

    The two kinds were measured separately and may differ even at tp_size 1, so one import never mixes them. Raises
    BadInput if the file has no figures of the kind asked for.
    """
    tables = {sequence for _, sequence, _ in memory.layers}
    rows = {sharding.sequence for sharding in memory.ranks}
    if asked is None:
        return max(tables or rows)
    if (asked is SequenceParallel.MEGATRON) not in tables | rows:
        problem = f"has no memory with sequence_parallel {asked.value}"
        raise BadInput(memory.file, problem, "leave out --sequence-parallel, or pass the other")
    return asked is SequenceParallel.MEGATRON


def model_memory(memory: Memory, lengths: Lengths, types: Sequence[str], sequence: bool) -> ModelMemory:
    """Return the memory figures of one kind of tables at one sequence length; `lengths`: the file's key for it."""
    kind = _kind(sequence)
    notes = [f"Memory, at tp_size 1 too, is what was measured {kind}."]
    layers: dict[str, Figures] = {}
    for index, name in enumerate(types):
        given, raw = _given_and_raw(memory, lengths, index, sequence)
        if given or raw:
            layers[name] = given or raw
        if raw and not given:
            notes.append(f"Memory of type {index} has no table: it is recomputed from the raw rows.")
        elif raw:
            notes += _disagreements(index, given, raw)
    ends = memory.ends.get((sequence, lengths), {})
    if not layers:
        notes.append(
            f"{memory.file.name} has neither table nor all raw rows of lengths {list(lengths)} {kind}:"
            " memory is absent."
        )
    elif not ends:
        notes.append(f"{memory.file.name} has no table of embedding and head {kind}: their memory is absent.")
    differing: list[str] = []
    for index, name in enumerate(types):
        given, raw = _given_and_raw(memory, lengths, index, not sequence)
        differing += _differing(f"of type {index}", layers.get(name, {}), given or raw)
    differing += _differing("of embedding and head", ends, memory.ends.get((not sequence, lengths), {}))
    if differing:
        said = f"At tp_size 1 the tables {_kind(not sequence)} say otherwise, and are not used"
        notes.append(f"{said}: {', '.join(differing)}.")
    measured = (each.tp_size for each in memory.ranks if each.sequence == sequence and not each.recompute)
    return ModelMemory(sequence, layers, ends, frozenset(measured), tuple(notes))


def _kind(sequence: bool) -> str:
    return "with sequence parallelism" if sequence else "without sequence parallelism"


def _given_and_raw(memory: Memory, lengths: Lengths, index: int, sequence: bool) -> tuple[Figures, Figures]:
    given = memory.layers.get((index, sequence, lengths[index : index + 1]), {})
    return given, figures_of_rows(memory, lengths, index, sequence)


def _differing(subject: str, used: Figures, other: Figures) -> Iterator[str]:
    """Yield a text for each figure at tp_size 1 in which two tables differ; none if one of the tables is empty."""
    if not (used and other):
        return
    names = (PARAMETER_SIZE, MODEL_STATES, ACTIVATION, CHECKPOINT)
    for key in ((name, 1) for name in names if (name, 1) in {**used, **other}):
        here, there = (f"{table[key]:.5g} MiB" if key in table else "nothing" for table in (used, other))
        if here != there:
            yield f"{key[0]} {subject} {there}, not {here}"


def _disagreements(index: int, given: Figures, raw: Figures) -> Iterator[str]:
    """Yield a sentence for each figure in the table that the file's raw rows contradict."""
    order = (PARAMETER_SIZE, CHECKPOINT, ACTIVATION)
    for name, tp_size in sorted(given.keys() & raw.keys(), key=lambda key: (order.index(key[0]), key[1])):
        table, rows = given[name, tp_size], raw[name, tp_size]
        if abs(table - rows) > _STALE * max(table, rows):
            at = f" at tp {tp_size}" if name == ACTIVATION else ""
            yield (
                f"{name}{at} of type {index} is {table:.5g} MiB in the table and {rows:.5g} MiB by the raw rows:"
                " the table is taken."
            )


def figures_of_rows(memory: Memory, lengths: Lengths, index: int, sequence: bool) -> Figures:
    """Return figures by Galvatron's arithmetic from raw rows without pipeline (ZeRO-3); empty if rows are missing."""
    figures: dict[tuple[str, int], float] = {}
    for sharding, rows in memory.ranks.items():
        if sharding.pp_size > 1 or sharding.vocabulary or sharding.sequence != sequence:
            continue
        resident = _per_layer(rows, "act", lengths, index)
        states = _per_layer(rows, "ms", lengths, index)
        if resident is None or states is None:
            continue
        forward, resident_mib = resident
        key = (CHECKPOINT, 1) if sharding.recompute else (ACTIVATION, sharding.tp_size)
        # A GPU has batch / dp_size samples.
        a_sample = resident_mib * sharding.dp_size / forward.batch
        figures[key] = max(figures.get(key, a_sample), a_sample) if sharding.recompute else a_sample
        if not sharding.recompute:
            whole = states[1] / 4 * sharding.world
            figures[PARAMETER_SIZE, 1] = max(figures.get((PARAMETER_SIZE, 1), whole), whole)
    return figures if (PARAMETER_SIZE, 1) in figures else {}


def _per_layer(
    rows: Mapping[RankMemory, float], kind: str, lengths: Lengths, index: int
) -> tuple[Forward, float] | None:
    """Return the smallest forward pass and the MiB of one layer of a type on rank 0; None if rows are missing.

    The MiB are the difference between the smallest pass and the next one with more layers of the type, per layer.
    """
    by_forward = {
        w.forward: mib for w, mib in rows.items() if w.rank == 0 and w.kind == kind and w.forward.lengths == lengths
    }
    if not by_forward:
        return None
    base = min(by_forward)
    for forward in sorted(by_forward):
        step = [more - fewer for more, fewer in zip(forward.layers, base.layers, strict=False)]
        if forward.batch == base.batch and any(step) and step[index] == sum(map(abs, step)):
            return base, (by_forward[forward] - by_forward[base]) / step[index]
    return None
