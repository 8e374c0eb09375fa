"""Memory of layers from Galvatron's tables, or from the raw rows where a table is missing."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwright_profile.importers.galvatron_keys import EndsMemory, Forward, LayerMemory, Lengths, Memory, RankMemory

__all__ = ["MIB", "Activation", "ModelMemory", "layer_memory_from_rows", "model_memory"]

MIB = 1024**2

_STALE = 0.01


class Activation(NamedTuple):
    """Bytes that one layer holds from forward to backward on one GPU, a sample of its group."""

    bytes_a_sample: float
    source: str


class EndsShare(NamedTuple):
    """Embedding and head together, on one GPU."""

    parameters_bytes: float | None
    """In float32."""
    activation: Activation | None
    source: str


class ModelMemory(NamedTuple):
    """What a memory file says of one length."""

    layers: Mapping[tuple[int, bool], LayerMemory]
    """By type and sequence parallelism."""
    ends: Mapping[bool, EndsMemory]
    """By sequence parallelism."""
    measured_tp_sizes: Mapping[bool, frozenset[int]]
    """With raw rows, by sequence parallelism."""
    notes: tuple[str, ...]

    def parameters_bytes(self, index: int) -> float | None:
        """Of one whole layer in float32."""
        entry = self.layers.get((index, False)) or self.layers.get((index, True))
        return None if entry is None else entry.parameters * MIB

    def activation(self, index: int, tp_size: int, sequence: bool, recompute: bool) -> Activation | None:
        """Of one layer, or None where the file does not say.

        Without tensor parallelism both tables say the same thing. What Galvatron halved in place of measuring is
        assumed. A recomputed layer holds its input, which only sequence parallelism splits.
        """
        for table in (sequence, not sequence) if tp_size == 1 else (sequence,):
            entry = self.layers.get((index, table))
            if entry is None:
                continue
            if recompute and entry.recomputed is not None:
                share = tp_size if sequence else 1
                return Activation(entry.recomputed * MIB / share, "derived")
            if not recompute and tp_size in entry.activations:
                measured = tp_size in self.measured_tp_sizes[table]
                return Activation(entry.activations[tp_size] * MIB, "derived" if measured else "assumed")
        return None

    def ends_at(self, tp_size: int, sequence: bool) -> EndsShare:
        """What the file says of embedding and head at that tp_size of the vocabulary."""
        for table in (sequence, not sequence) if tp_size == 1 else (sequence,):
            if (entry := self.ends.get(table)) is not None:
                states, held = entry.states.get(tp_size), entry.activations.get(tp_size)
                source = "derived" if tp_size in self.measured_tp_sizes[table] else "assumed"
                return EndsShare(
                    None if states is None else states * MIB / 4,
                    None if held is None else Activation(held * MIB, source),
                    source,
                )
        return EndsShare(None, None, "absent")


def model_memory(memory: Memory, lengths: Lengths, types: int) -> ModelMemory:
    """What the file says at one length: `lengths` by type, or one for all of them."""
    layers: dict[tuple[int, bool], LayerMemory] = {}
    notes = []
    for index in range(types):
        for sequence in (False, True):
            given = memory.layers.get((index, sequence, lengths[index : index + 1]))
            raw = layer_memory_from_rows(memory, lengths, index, sequence)
            if (entry := given or raw) is not None:
                layers[(index, sequence)] = entry
            if given is None and raw is not None:
                notes.append(f"Memory of type {index} has no table: it is recomputed from the raw rows.")
            elif given is not None and raw is not None:
                notes += _disagreements(index, sequence, given, raw)
    ends = {s: memory.ends[(s, lengths)] for s in (False, True) if (s, lengths) in memory.ends}
    if not layers:
        notes.append(
            f"{memory.file.name} has neither table nor all raw rows of lengths {list(lengths)}: memory is absent."
        )
    elif not ends:
        notes.append(f"{memory.file.name} has no table of embedding and head: their memory is absent.")
    return ModelMemory(layers, ends, {s: _measured_tp_sizes(memory, s) for s in (False, True)}, tuple(notes))


def layer_memory_from_rows(memory: Memory, lengths: Lengths, index: int, sequence: bool) -> LayerMemory | None:
    """Galvatron's own arithmetic on the raw rows without pipeline, under ZeRO-3; None where rows are missing."""
    parameters: list[float] = []
    activations: dict[int, float] = {}
    recomputed: list[float] = []
    for spread, rows in memory.ranks.items():
        if spread.pp_size > 1 or spread.vocabulary or spread.sequence != sequence:
            continue
        held = _per_layer(rows, "act", lengths, index)
        states = _per_layer(rows, "ms", lengths, index)
        if held is None or states is None:
            continue
        forward, held_mib = held
        # A GPU has batch/dp samples.
        a_sample = held_mib * spread.dp_size / forward.batch
        if spread.recompute:
            recomputed.append(a_sample)
        else:
            activations[spread.tp_size] = a_sample
            parameters.append(states[1] / 4 * spread.world)
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
    return frozenset(spread.tp_size for spread in memory.ranks if spread.sequence == sequence and not spread.recompute)


def _disagreements(index: int, sequence: bool, given: LayerMemory, raw: LayerMemory) -> Iterable[str]:
    """Figures of the table that its own raw rows do not give."""
    pairs = [("parameter_size", given.parameters, raw.parameters), ("checkpoint", given.recomputed, raw.recomputed)]
    pairs += [(f"activation at tp {t}", mib, raw.activations.get(t)) for t, mib in given.activations.items()]
    for name, table, rows in pairs:
        if table is not None and rows is not None and abs(table - rows) > _STALE * max(table, rows):
            kind = " with sequence parallelism" if sequence else ""
            yield (
                f"{name} of type {index}{kind} is {table:.5g} MiB in the table and {rows:.5g} MiB by the raw rows:"
                " the table is taken."
            )
