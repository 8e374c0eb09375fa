"""The keys of Galvatron's profile files (hetu-galvatron 2.4.0): numbers embedded in names, parsed strictly."""

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.io import BadInput, read_object

Lengths = tuple[int, ...]

_MAX_BYTES = 16 * 1024**2
_MAX_COUNT = 100_000_000
_MAX_NUMBER = 1e12

_LENGTHS = r"(?:_seq(?:\[(?P<lengths>[\d,]+)\]|(?P<length>\d+)))?"
_FORWARD = re.compile(rf"layernum\[(?P<layers>[\d,]+)\]_bsz(?P<batch>\d+){_LENGTHS}")
_LAYER = re.compile(rf"layertype_(?P<type>\d+)(?:_bsz(?P<batch>\d+))?{_LENGTHS}")
_OTHER = re.compile(rf"layertype_other(?:_\d+)?(?:_bsz(?P<batch>\d+))?{_LENGTHS}")
_SHARDING = re.compile(
    r"(?P<pp>[1-9]\d*)_(?P<tp>[1-9]\d*)_(?P<dp>[1-9]\d*)(?P<recompute>_c)?(?P<vocabulary>_vtp)?(?P<sequence>_sp)?"
)
_RANK_MEMORY = re.compile(_FORWARD.pattern + r"_rank(?P<rank>\d+)_(?P<kind>ms|act|act_peak)")
_LAYER_TABLE = re.compile(r"layertype_(?P<type>\d+)(?P<sequence>_sp)?")
_ENDS_TABLE = re.compile(r"other_memory_(?P<part>pp_off|pp_on_first|pp_on_last)(?P<sequence>_sp)?")


class Forward(NamedTuple):
    """A forward pass that was measured: layers of each type, samples, and positions by type (none in older files)."""

    layers: tuple[int, ...]
    batch: int
    lengths: Lengths


class Computation(NamedTuple):
    """A file of computation times, all in ms."""

    file: Path
    forwards: Mapping[Forward, float]
    """Milliseconds of the whole model."""
    layers: Mapping[tuple[int, int, Lengths], float]
    """Milliseconds of a sample in a layer, as in the file, by type, batch (0: not stated) and length of the type."""
    others: Mapping[tuple[int, Lengths], float]
    """Milliseconds of a sample in the rest of the model, as in the file, by batch (0: not stated) and lengths."""
    unknown: tuple[str, ...]
    """Keys that have none of the known forms."""


class Sharding(NamedTuple):
    """The distribution of a model over GPUs when its memory was measured."""

    pp_size: int
    tp_size: int
    dp_size: int
    recompute: bool
    vocabulary: bool
    sequence: bool

    @property
    def world(self) -> int:
        """Return the number of GPUs."""
        return self.pp_size * self.tp_size * self.dp_size


class RankMemory(NamedTuple):
    """A memory reading: its forward pass (whose batch is the global one), its rank and its kind."""

    forward: Forward
    rank: int
    kind: str
    """Kind of memory: `ms` is allocated after backward, `act` is added by forward, `act_peak` is the peak over `ms`."""


Figures = Mapping[tuple[str, int], float]
"""MiB of one layer, or of embedding and head, by kind of figure and by tp_size of the layer or the vocabulary."""

PARAMETER_SIZE = "parameter_size"
"""Kind of figure: a whole layer's parameters in float32; only at tp_size 1."""
ACTIVATION = "activation"
"""Kind of figure: activations on one GPU per sample of its tensor-parallel group; for embedding and head, the peak."""
CHECKPOINT = "checkpoint"
"""Kind of figure: a recomputed layer's activations; only at tp_size 1."""
MODEL_STATES = "model_states"
"""Kind of figure: the model states of embedding and head on one GPU without ZeRO, 16 bytes per parameter."""

_NAMES = {"tp_activation_per_bsz_dict": ACTIVATION}
_OF_LAYER, _OF_ENDS = {PARAMETER_SIZE, *_NAMES}, {MODEL_STATES, ACTIVATION}


class Memory(NamedTuple):
    """A file of memory figures, all in MiB."""

    file: Path
    ranks: Mapping[Sharding, Mapping[RankMemory, float]]
    layers: Mapping[tuple[int, bool, Lengths], Figures]
    """Figures of one layer by type, sequence parallelism (True or False) and length of that type."""
    ends: Mapping[tuple[bool, Lengths], Figures]
    """Figures of embedding and head together without pipeline, by sequence parallelism (True or False) and lengths."""
    unknown: tuple[str, ...]


def read_numbers(file: Path) -> dict[str, float]:
    """Return the numbers of a JSON object; raise BadInput for anything else."""
    return {key: _number(file, key, value) for key, value in read_object(file, _MAX_BYTES).items()}


def read_computation(file: Path) -> Computation:
    """Return the content of a `computation_profiling_*.json`; raise BadInput naming a key with an impossible number."""
    forwards: dict[Forward, float] = {}
    layers: dict[tuple[int, int, Lengths], float] = {}
    others: dict[tuple[int, Lengths], float] = {}
    unknown = []
    for key, value in read_numbers(file).items():
        if match := _FORWARD.fullmatch(key):
            forwards[_forward(file, match)] = _positive(file, key, value)
        elif match := _LAYER.fullmatch(key):
            layers[(_count(file, match["type"]), _batch(file, match), _lengths(file, match))] = value
        elif match := _OTHER.fullmatch(key):
            others[(_batch(file, match), _lengths(file, match))] = value
        else:
            unknown.append(key)
    if not forwards and not layers:
        raise BadInput(file, "contains no times of layers", "pass a computation_profiling_*.json of Galvatron")
    return Computation(file, forwards, layers, others, tuple(unknown))


def read_memory(file: Path) -> Memory:
    """Return the content of a `memory_profiling_*.json`; raise BadInput naming a key with an impossible number."""
    ranks: dict[Sharding, Mapping[RankMemory, float]] = {}
    layers: dict[tuple[int, bool, Lengths], Figures] = {}
    ends: dict[tuple[bool, Lengths], Figures] = {}
    unknown = []
    for key, value in read_object(file, _MAX_BYTES).items():
        if match := _SHARDING.fullmatch(key):
            ranks[_sharding(file, match)] = _rank_memories(file, key, value)
        elif match := _LAYER_TABLE.fullmatch(key):
            for lengths, figures in _tables(file, key, value, _OF_LAYER):
                layers[(_count(file, match["type"]), bool(match["sequence"]), lengths)] = figures
        elif match := _ENDS_TABLE.fullmatch(key):
            tables = _tables(file, key, value, _OF_ENDS)
            if match["part"] == "pp_off":
                ends |= {(bool(match["sequence"]), lengths): figures for lengths, figures in tables}
        else:
            unknown.append(key)
    if not ranks and not layers:
        raise BadInput(file, "contains no memory measurements of layers", "pass a memory_profiling_*.json of Galvatron")
    return Memory(file, ranks, layers, ends, tuple(unknown))


def _number(file: Path, key: str, value: object) -> float:
    """Return a JSON number as a float; raise BadInput if it is not a number, or implausibly large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(file, f"{key!r} is {_shown(value)}, not a number", "measure that point again")
    if abs(value) > _MAX_NUMBER:
        raise BadInput(file, f"{key!r} is implausibly large", "measure that point again")
    return float(value)


def _positive(file: Path, key: str, value: object) -> float:
    if (number := _number(file, key, value)) <= 0:
        raise BadInput(file, f"{key!r} is {number:g}, not positive", "measure that point again")
    return number


def _count(file: Path, text: str) -> int:
    # Checked as text first: converting a number of a million digits would take long.
    if not text.isdecimal() or len(text) > len(str(_MAX_COUNT)) or int(text) > _MAX_COUNT:
        raise BadInput(file, f"a key declares a size of {text[:20]}", "pass a file as Galvatron writes it")
    return int(text)


def _counts(file: Path, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > 64 or "" in parts:
        raise BadInput(file, f"a key declares the list [{text[:20]}]", "pass a file as Galvatron writes it")
    return tuple(_count(file, part) for part in parts)


def _batch(file: Path, match: re.Match[str]) -> int:
    return _count(file, match["batch"] or "0")


def _lengths(file: Path, match: re.Match[str]) -> Lengths:
    text = match["lengths"] or match["length"]
    return _counts(file, text) if text else ()


def _forward(file: Path, match: re.Match[str]) -> Forward:
    made = Forward(_counts(file, match["layers"]), _batch(file, match), _lengths(file, match))
    if made.batch == 0:
        raise BadInput(file, f"{match.group()!r} is for a batch of 0", "pass a file as Galvatron writes it")
    return made


def _sharding(file: Path, match: re.Match[str]) -> Sharding:
    pp_size, tp_size, dp_size = (_count(file, match[name]) for name in ("pp", "tp", "dp"))
    flags = (bool(match[name]) for name in ("recompute", "vocabulary", "sequence"))
    return Sharding(pp_size, tp_size, dp_size, *flags)


def _rank_memories(file: Path, key: str, value: object) -> dict[RankMemory, float]:
    made = {}
    for inner, size in _object(file, key, value).items():
        if (match := _RANK_MEMORY.fullmatch(inner)) is None:
            raise BadInput(file, f"{inner!r} of {key!r} is unknown", "pass a file as Galvatron writes it")
        where = RankMemory(_forward(file, match), _count(file, match["rank"]), match["kind"])
        made[where] = _not_negative(file, inner, size)
    return made


def _tables(file: Path, key: str, value: object, names: Set[str]) -> list[tuple[Lengths, Figures]]:
    """Return the tables of figures, each with its lengths; one table with empty lengths if the file has none."""
    table = _object(file, key, value)
    if names & table.keys():
        return [((), _figures(file, key, table, names))]
    return [
        (_counts(file, name.strip("[]")), _figures(file, key, _object(file, key, entry), names))
        for name, entry in table.items()
    ]


def _figures(file: Path, key: str, entry: Mapping[str, Any], names: Set[str]) -> Figures:
    if set(entry) != names:
        raise BadInput(file, f"{key!r} has keys {sorted(entry)}", "pass a file as Galvatron writes it")
    made: dict[tuple[str, int], float] = {}
    for name, value in entry.items():
        # Older files have one number for embedding and head, without a parallel vocabulary.
        sizes = value if isinstance(value, dict) and name != PARAMETER_SIZE else {"1": value}
        for size, mib in sizes.items():
            if size == CHECKPOINT:
                made[CHECKPOINT, 1] = _not_negative(file, key, mib)
            elif re.fullmatch(r"[1-9]\d{0,5}", size):
                read = _positive if name == PARAMETER_SIZE else _not_negative
                made[_NAMES.get(name, name), int(size)] = read(file, key, mib)
            else:
                raise BadInput(file, f"{key!r} has {size!r} instead of a tp_size", "pass a file as Galvatron writes it")
    return made


def _not_negative(file: Path, key: str, value: object) -> float:
    if (number := _number(file, key, value)) < 0:
        raise BadInput(file, f"{key!r} is {number:g}, below 0", "measure that point again")
    return number


def _object(file: Path, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(file, f"{key!r} is {_shown(value)}, not an object", "pass a file as Galvatron writes it")
    return value


def _shown(value: object) -> str:
    return repr(value)[:40]
