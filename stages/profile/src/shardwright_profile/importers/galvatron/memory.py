"""Memory of layers from Galvatron's tables, or from the raw rows where a table is missing."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.table import Source
from shardwright_formats.types.strategy import SequenceParallel
from shardwright_profile.importers.galvatron.keys import EndsMemory, Forward, LayerMemory, Lengths, Memory, RankMemory

__all__ = ["MIB", "Activation", "ModelMemory", "layer_memory_from_rows", "model_memory", "tables_of"]

MIB = 1024**2

_STALE = 0.01


class Activation(NamedTuple):
    """Bytes that one layer holds from forward to backward on one GPU, a sample of its group."""

    bytes_a_sample: float
    source: Source


class EndsShare(NamedTuple):
    """Embedding and head together, on one GPU."""

    parameters_bytes: float | None
    """In float32."""
    activation: Activation | None
    source: Source


class ModelMemory(NamedTuple):
    """What a memory file says of one length, all of it from one kind of its tables."""

    sequence: bool
    """Whether these are its tables with sequence parallelism."""
    layers: Mapping[int, LayerMemory]
    """By type."""
    ends: EndsMemory | None
    measured_tp_sizes: frozenset[int]
    """With raw rows."""
    notes: tuple[str, ...]

    def parameters_bytes(self, index: int) -> float | None:
        """Of one whole layer in float32."""
        entry = self.layers.get(index)
        return None if entry is None else entry.parameters * MIB

    def activation(self, index: int, tp_size: int, recompute: bool) -> Activation | None:
        """Of one layer, or None where the tables do not say.

        What Galvatron halved in place of measuring is assumed. A recomputed layer holds its input, which only sequence
        parallelism splits.
        """
        entry = self.layers.get(index)
        if entry is None:
            return None
        if recompute:
            share = tp_size if self.sequence else 1
            return None if entry.recomputed is None else Activation(entry.recomputed * MIB / share, Source.DERIVED)
        resident = entry.activations.get(tp_size)
        return None if resident is None else Activation(resident * MIB, self.source_at(tp_size))

    def ends_at(self, tp_size: int) -> EndsShare:
        """What the tables say of embedding and head at that tp_size of the vocabulary."""
        if self.ends is None:
            return EndsShare(None, None, Source.ABSENT)
        states, resident = self.ends.states.get(tp_size), self.ends.activations.get(tp_size)
        source = self.source_at(tp_size)
        return EndsShare(
            None if states is None else states * MIB / 4,
            None if resident is None else Activation(resident * MIB, source),
            source,
        )

    def source_at(self, tp_size: int) -> Source:
        """Of a figure at that tp_size."""
        return Source.DERIVED if tp_size in self.measured_tp_sizes else Source.ASSUMED


def tables_of(memory: Memory, asked: SequenceParallel | None) -> bool:
    """Whether memory is of the tables with sequence parallelism: as asked for, else where the file has them.

    The two kinds were measured apart, and may differ at tp_size 1 too: one import never mixes them. Raises BadInput
    where the file has none of the kind asked for.
    """
    tables = {sequence for _, sequence, _ in memory.layers}
    rows = {sharding.sequence for sharding in memory.ranks}
    if asked is None:
        return max(tables or rows)
    known = {SequenceParallel.MEGATRON if sequence else SequenceParallel.NONE for sequence in tables | rows}
    if asked not in known:
        what = f"has no memory with sequence_parallel {asked.value}"
        raise BadInput(memory.file, what, "leave out --sequence-parallel, or pass the other")
    return asked is SequenceParallel.MEGATRON


def model_memory(memory: Memory, lengths: Lengths, types: int, sequence: bool) -> ModelMemory:
    """What one kind of tables says at one length: `lengths` by type, or one for all of them."""
    kind = _kind(sequence)
    notes = [f"Memory, at tp_size 1 too, is what was measured {kind}."]
    layers: dict[int, LayerMemory] = {}
    for index in range(types):
        given, raw = _given_and_raw(memory, lengths, index, sequence)
        if (entry := given or raw) is not None:
            layers[index] = entry
        if given is None and raw is not None:
            notes.append(f"Memory of type {index} has no table: it is recomputed from the raw rows.")
        elif given is not None and raw is not None:
            notes += _disagreements(index, given, raw)
    ends = memory.ends.get((sequence, lengths))
    if not layers:
        notes.append(
            f"{memory.file.name} has neither table nor all raw rows of lengths {list(lengths)} {kind}:"
            " memory is absent."
        )
    elif ends is None:
        notes.append(f"{memory.file.name} has no table of embedding and head {kind}: their memory is absent.")
    notes += _said_otherwise(memory, lengths, layers, ends, sequence)
    return ModelMemory(sequence, layers, ends, _measured_tp_sizes(memory, sequence), tuple(notes))


def _kind(sequence: bool) -> str:
    return "with sequence parallelism" if sequence else "without sequence parallelism"


def _given_and_raw(
    memory: Memory, lengths: Lengths, index: int, sequence: bool
) -> tuple[LayerMemory | None, LayerMemory | None]:
    given = memory.layers.get((index, sequence, lengths[index : index + 1]))
    return given, layer_memory_from_rows(memory, lengths, index, sequence)


def _said_otherwise(
    memory: Memory, lengths: Lengths, layers: Mapping[int, LayerMemory], ends: EndsMemory | None, sequence: bool
) -> Iterator[str]:
    """What the tables of the other kind say of a single rank, where that is not what is taken."""
    differing: list[str] = []
    for index, own in layers.items():
        given, raw = _given_and_raw(memory, lengths, index, not sequence)
        if (other := given or raw) is not None:
            differing += _differing(f"of type {index}", _alone(own), _alone(other))
    if ends is not None and (other_ends := memory.ends.get((not sequence, lengths))) is not None:
        differing += _differing("of embedding and head", _ends_alone(ends), _ends_alone(other_ends))
    if differing:
        yield f"At tp_size 1 the tables {_kind(not sequence)} say otherwise, and are not used: {', '.join(differing)}."


def _differing(what: str, own: Mapping[str, float | None], other: Mapping[str, float | None]) -> Iterator[str]:
    for name, mib in own.items():
        here, there = ("nothing" if value is None else f"{value:.5g} MiB" for value in (mib, other[name]))
        if here != there:
            yield f"{name} {what} {there}, not {here}"


def _alone(entry: LayerMemory) -> dict[str, float | None]:
    return {
        "parameter_size": entry.parameters,
        "activation": entry.activations.get(1),
        "checkpoint": entry.recomputed,
    }


def _ends_alone(entry: EndsMemory) -> dict[str, float | None]:
    return {"model_states": entry.states.get(1), "activation": entry.activations.get(1)}


def layer_memory_from_rows(memory: Memory, lengths: Lengths, index: int, sequence: bool) -> LayerMemory | None:
    """Galvatron's own arithmetic on the raw rows without pipeline, under ZeRO-3; None where rows are missing."""
    parameters: list[float] = []
    activations: dict[int, float] = {}
    recomputed: list[float] = []
    for sharding, rows in memory.ranks.items():
        if sharding.pp_size > 1 or sharding.vocabulary or sharding.sequence != sequence:
            continue
        resident = _per_layer(rows, "act", lengths, index)
        states = _per_layer(rows, "ms", lengths, index)
        if resident is None or states is None:
            continue
        forward, resident_mib = resident
        # A GPU has batch/dp samples.
        a_sample = resident_mib * sharding.dp_size / forward.batch
        if sharding.recompute:
            recomputed.append(a_sample)
        else:
            activations[sharding.tp_size] = a_sample
            parameters.append(states[1] / 4 * sharding.world)
    if not parameters:
        return None
    return LayerMemory(max(parameters), activations, max(recomputed, default=None))


def _per_layer(
    rows: Mapping[RankMemory, float], kind: str, lengths: Lengths, index: int
) -> tuple[Forward, float] | None:
    """On rank 0, one layer of a type: the fewest layers and the fewest but for that type."""
    found = {
        w.forward: mib for w, mib in rows.items() if w.rank == 0 and w.kind == kind and w.forward.lengths == lengths
    }
    if not found:
        return None
    base = min(found)
    for forward in sorted(found):
        step = [more - fewer for more, fewer in zip(forward.layers, base.layers, strict=False)]
        if forward.batch == base.batch and any(step) and step[index] == sum(map(abs, step)):
            return base, (found[forward] - found[base]) / step[index]
    return None


def _measured_tp_sizes(memory: Memory, sequence: bool) -> frozenset[int]:
    return frozenset(
        sharding.tp_size for sharding in memory.ranks if sharding.sequence == sequence and not sharding.recompute
    )


def _disagreements(index: int, given: LayerMemory, raw: LayerMemory) -> Iterable[str]:
    """Figures of the table that its own raw rows do not give."""
    pairs = [("parameter_size", given.parameters, raw.parameters), ("checkpoint", given.recomputed, raw.recomputed)]
    pairs += [(f"activation at tp {t}", mib, raw.activations.get(t)) for t, mib in given.activations.items()]
    for name, table, rows in pairs:
        if table is not None and rows is not None and abs(table - rows) > _STALE * max(table, rows):
            yield (
                f"{name} of type {index} is {table:.5g} MiB in the table and {rows:.5g} MiB by the raw rows:"
                " the table is taken."
            )
