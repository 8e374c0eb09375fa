"""Galvatron's time formula with single defects mended, to find what makes it prefer a plan.

Runs inside the peer's environment, together with galvatron_search.py. `DEFECTS` are mended one at a time:

- middle_stages: a step is bound by the slowest pipeline stage, not only by the first or the last.
- vocabulary_sync: the gradients of embedding and head are reduced once a step.
- zero3_gathers: every microbatch gathers ZeRO-3 parameters twice; the peer counts one gather in all but the last.
- stage_sends: activations cross pp - 1 cuts once in each direction, not pp cuts once for every layer type.

`DIFFERENCES` are choices in which the imported profile, and thus our cost model, differs, but which are no defects:

- whole_collectives: tensor-parallel messages are priced by published times of whole collectives, not by bandwidths.
- fixed_time: the part of a layer's time that is the same at any batch size is divided by tp_size like the rest.

The inter-layer cost, 100 times too high, is only in its dynamic programme: no price of a whole plan contains it.
"""

import numpy as np

DEFECTS = ("middle_stages", "vocabulary_sync", "zero3_gathers", "stage_sends")
DIFFERENCES = ("whole_collectives", "fixed_time")


def time_model(shipped: type, mended: frozenset[str], num_types: int) -> type:
    """Return the peer's time model of a layer, with the repairs in `mended` that affect a layer's time."""

    class Mended(shipped):
        def estimate_computation_time(self) -> None:
            super().estimate_computation_time()
            line = self.args.forward_computation_time
            if "fixed_time" in mended and isinstance(line, np.ndarray):
                whole_batch = line[0] * self.bsz + line[1]
                ratio = whole_batch / self.tp_size * self.layer_num / self.fct
                self.fct, self.bct = self.fct * ratio, self.bct * ratio

        def estimate_dp_communication_cost(self) -> None:
            super().estimate_dp_communication_cost()
            if "zero3_gathers" in mended and self.args.no_comm and self.fsdp:
                # During the backward pass, as the peer counts it if gradients are also reduced.
                self.dp_message_size = self.fsdp_allgather_message_size

        def estimate_tp_communication_cost(self) -> None:
            super().estimate_tp_communication_cost()
            if "whole_collectives" in mended and self.tp_size > 1:
                slope, latency = self.sp_dict["popt"]  # of half an all-reduce, ms on MiB
                mib = self.bsz * self.seq_len * self.hidden_size * 2 / 2**20
                count = 4 * self.layer_num * (1.5 if self.checkpoint else 1.0)
                self.tp_communication_time = count * 2 * (slope * mib + latency)

        def estimate_pp_communication_cost(self) -> None:
            super().estimate_pp_communication_cost()
            if "stage_sends" in mended and self.pp_size > 1:
                self.p2p_message_size *= (self.pp_size - 1) / self.pp_size / num_types

    return Mended


def pipeline_s(
    totals: list[float],
    computes: list[float],
    synced: list[float],
    unsynced: list[float],
    microbatches: int,
    mended: frozenset[str],
) -> float:
    """Return the seconds of a step, as `pipeline_costmodel` of hetu-galvatron 2.4.0 does.

    By pipeline stage, in seconds: `totals` and `computes`, a microbatch with gradient sync and without; `synced` and
    `unsynced`, its embedding and head with gradient sync and without.
    """
    stages = [compute + other for compute, other in zip(computes, unsynced, strict=True)]
    count, rest = len(stages), sum(stages[1:])
    if "middle_stages" in mended:
        step_s = sum(stages) + (microbatches - 1) * max(stages)
    else:
        filling = min(count - 1, microbatches - 1) * stages[0]
        by_first = sum(max(filling * part, rest * part) for part in (1 / 3, 2 / 3))
        by_first += stages[0] * max(0, microbatches + 1 - count)
        step_s = max(sum(stages) + stages[-1] * (microbatches - 1), by_first)
    lasts = list(totals)
    if "vocabulary_sync" in mended:
        lasts = [total + other for total, other in zip(totals, synced, strict=True)]
    late = max(last - sum(stages[: i + 1]) for i, last in enumerate(lasts))
    return step_s + max(0.0, late)
