"""The results of probes, read from measurements and checked to be comparable, and the costs of layers: differences."""

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from pathlib import Path
from statistics import median
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.key import LayerKey, rows_by_key
from shardwright.plan.differences import Duration, median_of, paired_difference
from shardwright.plan.process_groups import COMMUNICATOR_BYTES, communicator_bytes, communicators
from shardwright.types import EMBEDDING, HEAD, Attention, DataParallel, Measurement, Plan, PlanMeasurement, profiled_as
from shardwright.types.model_profile import ProfileOrigin
from shardwright_profile.model.probes import is_apart, layer_counts, no_probe, probe_key

LAYERS = "layers"
FORWARD, BACKWARD = "forward time", "backward time"
"""Names of the two quantities that are times of layers."""
_SEGMENTS = (EMBEDDING, LAYERS, HEAD)

Measured = tuple[Path, Measurement]


class Repeats(NamedTuple):
    """Seconds by rank and repeat."""

    ranks: tuple[tuple[float, ...], ...]

    @property
    def slowest(self) -> Duration:
        """Return the median of the slowest rank in seconds, with its standard error."""
        return max(map(median_of, self.ranks))

    def beyond(self, other: "Repeats") -> Duration:
        """Return how much longer these take than `other`, compared round by round, on the rank slowest in both."""
        slowest = max(zip(self.ranks, other.ranks, strict=True), key=lambda pair: sum(map(median, pair)))
        return paired_difference(slowest[1], slowest[0])

    def scaled(self, by: float) -> "Repeats":
        """Return the repeats multiplied by a factor."""
        return Repeats(tuple(tuple(by * time_s for time_s in rank) for rank in self.ranks))


class SegmentCost(NamedTuple):
    """The times of one microbatch in a segment on all ranks, and its memory on the fullest rank."""

    forward: Repeats
    backward: Repeats
    activation_bytes: int
    workspace_bytes: int


class ProbeResult(NamedTuple):
    """The result of one measured probe: medians of times on the slowest rank, bytes on the fullest rank."""

    file: Path
    plan: Plan
    key: LayerKey
    counts: Mapping[str, int]
    """Number of layers by block type."""
    segments: Mapping[str, SegmentCost]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    process_bytes: int
    """Bytes of the process, minus the bytes that its communicators are assumed to hold."""
    communicator_bytes: int
    """Bytes that each communicator is assumed to hold; 0 over gloo."""
    resident_bytes: int
    step_s: float
    reduction_s: float
    optimizer_s: float
    reference_s: float
    """Seconds of the reference workload at the time of the probe's measurement, as a measure of the machine's speed."""
    in_turns: tuple[str, ...]
    """SHA-256 of the plans that were stepped alternately with it. From its measurement, like `measured_again`."""
    measured_again: int
    cp_size: int  # 1, unless samples represent one rank's share of longer samples

    @property
    def data_parallel(self) -> DataParallel:
        """Return the kind of data parallelism, which is the same for all its layers."""
        return self.plan.layers[0].data_parallel

    @property
    def is_uniform(self) -> bool:
        """Return whether embedding and head are sharded like its layers."""
        return self.plan.embedding.tp_size == self.plan.layers[0].tp_size

    def times(self, quantity: str) -> Repeats:
        """Return the forward or the backward times of all its layers together."""
        return self.segments[LAYERS].forward if quantity == FORWARD else self.segments[LAYERS].backward

    @property
    def microbatch_s(self) -> float:
        """Return the seconds of forward and backward of the middle microbatch."""
        return sum(cost.forward.slowest.median_s + cost.backward.slowest.median_s for cost in self.segments.values())

    def at_speed(self, reference_s: float) -> "ProbeResult":
        """Return the result with its times scaled to a machine that takes `reference_s` for the reference workload."""
        by = reference_s / self.reference_s
        return self._replace(
            segments={
                name: cost._replace(forward=cost.forward.scaled(by), backward=cost.backward.scaled(by))
                for name, cost in self.segments.items()
            },
            step_s=by * self.step_s,
            reduction_s=by * self.reduction_s,
            optimizer_s=by * self.optimizer_s,
            reference_s=reference_s,
        )


def read_probes(measurements: Sequence[Measured]) -> tuple[ProfileOrigin, Provenance, tuple[ProbeResult, ...]]:
    """Return the common origin of all measurements, their provenance, and their probes by key and layer counts.

    A machine's speed drifts from probe to probe, so all times are scaled to the median speed. The speed at a probe is
    the median over the probe and its neighbours, so that a momentary disturbance spoils no difference of two probes.

    Raises BadInput if they differ in model, device, backend, precision or attention, if a plan is not a probe, if
    a probe was measured twice, and if one ran out of memory.
    """
    for file, measurement in measurements:
        for failure in measurement.failed:
            problem = f"probe {failure.plan.name!r} ran out of memory on rank {failure.rank}"
            raise BadInput(file, problem, "measure probes of smaller batches, shorter samples or fewer layers")
    results = [
        _result(file, measured, _reference_s(measurement.plans, place), _of_each_communicator(measurement))
        for file, measurement in measurements
        for place, measured in enumerate(measurement.plans)
    ]
    origins = [(file, _origin(m, measured)) for file, m in measurements for measured in m.plans]
    first_file, origin = origins[0]
    for file, other in origins[1:]:
        for field in ProfileOrigin.__struct_fields__:
            if (one := getattr(origin, field)) != (two := getattr(other, field)):
                problem = f"{field} is {two!r}, but {one!r} in {first_file}"
                raise BadInput(file, problem, "fit the measurements of one model on one kind of device at a time")
    seen: dict[tuple[object, ...], ProbeResult] = {}
    for result in results:
        kind = result.key, result.data_parallel, is_apart(result.plan), result.cp_size
        identity = (*kind, *sorted(result.counts.items()))
        if identity in seen:
            raise BadInput(
                result.file,
                f"probe {result.plan.name!r} was already measured in {seen[identity].file}",
                "pass one of them",
            )
        seen[identity] = result
    versions = "; ".join(sorted({measurement.versions for _, measurement in measurements}))
    by = sorted({m.attention_by for _, m in measurements} - {""})
    notes = f"attention by {'; '.join(by)}" if by else ""
    provenance = Provenance(date=max(m.date for _, m in measurements), versions=versions, notes=notes)
    reference_s = median(result.reference_s for result in results)
    ordered = sorted(results, key=lambda r: (r.data_parallel, r.key, r.cp_size, sorted(r.counts.items())))
    return origin, provenance, tuple(result.at_speed(reference_s) for result in ordered)


def _origin(measurement: Measurement, measured: PlanMeasurement) -> ProfileOrigin:
    plan = measured.plan
    return ProfileOrigin(
        model=plan.model.name,
        architecture_sha256=plan.model.architecture_sha256,
        device=measurement.device,
        backend=measurement.backend,
        precision=profiled_as(plan.precision, plan.compile),
        attention=measurement.attention if plan.attention is Attention.AUTO else plan.attention.value,
    )


def _reference_s(measured: Sequence[PlanMeasurement], place: int) -> float:
    """Return the seconds of the reference workload at the time when the plan at index `place` was measured.

    For plans that were stepped alternately it is the median over the steps of all of them; otherwise the median over
    the plan and its neighbours.
    """
    if turns := measured[place].in_turns:
        return median(time_s for plan in measured if plan.in_turns == turns for time_s in plan.reference_times_s)
    return median(plan.reference_s for plan in measured[max(0, place - 1) : place + 2])


def _of_each_communicator(measurement: Measurement) -> int:
    return COMMUNICATOR_BYTES if measurement.backend == "nccl" else 0


def _result(file: Path, measured: PlanMeasurement, reference_s: float, of_each: int) -> ProbeResult:
    plan = measured.plan
    if (problem := no_probe(plan)) is not None:
        raise BadInput(file, f"plan {plan.name!r} is not a probe: {problem}", "pass measurements of probes")

    def largest(bytes_of: Callable[[int], int]) -> int:
        return max(bytes_of(rank) for rank in range(plan.world_size))

    ranks, held = measured.ranks, communicators(plan)
    memory = [rank.memory for rank in ranks]
    return ProbeResult(
        file=file,
        plan=plan,
        key=probe_key(plan),
        counts=layer_counts(plan.model),
        segments={name: _segment(file, measured, name) for name in _SEGMENTS},
        parameter_bytes=largest(lambda rank: memory[rank].parameters_bytes),
        gradient_bytes=largest(lambda rank: memory[rank].gradients_bytes),
        optimizer_bytes=largest(lambda rank: memory[rank].optimizer_bytes),
        process_bytes=largest(
            lambda rank: max(0, memory[rank].process_bytes - communicator_bytes(held[rank], of_each))
        ),
        communicator_bytes=of_each,
        resident_bytes=largest(lambda rank: memory[rank].resident_bytes),
        step_s=median(measured.step_times_s),
        reduction_s=_slowest_s(file, measured, "gradient_reduction_s", [r.gradient_reduction_s for r in ranks]),
        optimizer_s=_slowest_s(file, measured, "optimizer_s", [r.optimizer_s for r in ranks]),
        reference_s=reference_s,
        in_turns=measured.in_turns,
        measured_again=measured.measured_again,
        cp_size=measured.cp_size or 1,
    )


def _segment(file: Path, measured: PlanMeasurement, name: str) -> SegmentCost:
    times = [segment for rank in measured.ranks for segment in rank.segments if segment.name == name]
    memory = [segment for rank in measured.ranks for segment in rank.memory.segments if segment.name == name]
    if len(times) != measured.plan.world_size or len(memory) != measured.plan.world_size:
        problem = f"probe {measured.plan.name!r} has no segment {name!r} of every rank, in time and in memory"
        raise BadInput(file, problem, "measure it again")
    return SegmentCost(
        forward=_repeats(file, measured, f"forward_s of {name}", [segment.forward_s for segment in times]),
        backward=_repeats(file, measured, f"backward_s of {name}", [segment.backward_s for segment in times]),
        activation_bytes=max(segment.activation_bytes for segment in memory),
        workspace_bytes=max(max(s.forward_workspace_bytes, s.backward_workspace_bytes) for s in memory),
    )


def _slowest_s(file: Path, measured: PlanMeasurement, quantity: str, ranks: Sequence[tuple[float, ...]]) -> float:
    return _repeats(file, measured, quantity, ranks).slowest.median_s


def _repeats(file: Path, measured: PlanMeasurement, quantity: str, ranks: Sequence[tuple[float, ...]]) -> Repeats:
    if any(not repeats for repeats in ranks):
        problem = f"probe {measured.plan.name!r} has no repeats of {quantity}"
        raise BadInput(file, problem, "measure it with more steps")
    return Repeats(tuple(ranks))


class LayerPair(NamedTuple):
    """Two probes of one key that differ only in the number of layers of one block type."""

    type: str
    few: ProbeResult
    many: ProbeResult

    @property
    def layers(self) -> int:
        """Return the number of layers by which the two probes differ."""
        return self.many.counts[self.type] - self.few.counts[self.type]

    @property
    def in_turns(self) -> bool:
        """Return whether the two probes were stepped alternately, so that steps of equal number belong to one round."""
        return bool(self.few.in_turns) and self.few.in_turns == self.many.in_turns


def layer_pairs(probes: Sequence[ProbeResult]) -> tuple[LayerPair, ...]:
    """Return a pair for every key and block type: the probes with the fewest and with the most layers of the type.

    This is Galvatron's method (Miao et al. 2022): whatever does not grow with the layers cancels in the difference.
    Types whose output has another shape than their input have no pair. Raises BadInput naming a probe without partner.
    """
    return tuple(
        _pair(group, name)
        for group in rows_by_key(probes).values()
        for name in group[0].counts
        if name not in group[0].plan.model.reshaping
    )


def seconds_per_layer(pair: LayerPair, quantity: str) -> Duration:
    """Return the forward or backward time of a layer; raise BadInput naming both probes if the deeper is not slower.

    If the probes were stepped alternately, it is the median difference over the rounds, else the difference of medians.
    """
    few, many = pair.few.times(quantity), pair.many.times(quantity)
    more = many.beyond(few) if pair.in_turns else _difference(few.slowest, many.slowest)
    if more.median_s <= 0:
        raise _noisy(pair, quantity, *(f"{repeats.slowest.median_s:.6g} s" for repeats in (few, many)))
    return more.scaled(1 / pair.layers)


def _difference(few: Duration, many: Duration) -> Duration:
    """Return `many` minus `few`, two medians whose errors are independent."""
    return Duration(many.median_s - few.median_s, hypot(few.error_s, many.error_s))


def bytes_per_layer(pair: LayerPair, quantity: str, bytes_of: Callable[[ProbeResult], int]) -> int:
    """Return the bytes of one layer, rounded up; raise BadInput naming both probes if the deeper one holds less."""
    few_bytes, many_bytes = bytes_of(pair.few), bytes_of(pair.many)
    if many_bytes < few_bytes:
        raise _noisy(pair, quantity, f"{few_bytes} bytes", f"{many_bytes} bytes")
    return -((few_bytes - many_bytes) // pair.layers)


def _noisy(pair: LayerPair, quantity: str, few: str, many: str) -> BadInput:
    return BadInput(
        pair.many.file,
        f"{quantity} of {pair.many.plan.name!r} ({many}) is not above that of {pair.few.plan.name!r} ({few})",
        "measure both with more --steps on a quieter machine",
    )


def _pair(probes: Sequence[ProbeResult], name: str) -> LayerPair:
    few = min(probes, key=lambda probe: sum(probe.counts.values()))
    partners = [probe for probe in probes if _differ_in(few, probe, name)]
    if not partners:
        raise BadInput(
            few.file,
            f"probe {few.plan.name!r} has no partner with more layers of type {name!r}",
            "measure every plan of the probes file and pass all measurements",
        )
    return LayerPair(name, few, max(partners, key=lambda probe: probe.counts[name]))


def _differ_in(few: ProbeResult, many: ProbeResult, name: str) -> bool:
    others = {key: count for key, count in few.counts.items() if key != name}
    same = others == {key: count for key, count in many.counts.items() if key != name}
    return same and many.counts.get(name, 0) > few.counts[name]
