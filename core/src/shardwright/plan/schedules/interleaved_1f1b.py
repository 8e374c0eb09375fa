"""Interleaved 1F1B (Narayanan et al. 2021): 1F1B with several layer ranges (chunks) on every pipeline stage."""

from collections.abc import Sequence
from itertools import pairwise

from shardwright.plan.schedules.one_f_one_b import OneFOneB
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Schedule


class Interleaved1F1B(OneFOneB):
    """Interleaved 1F1B: a group of micro-batches goes through chunk 0, then chunk 1 and so on, then the next group.

    Backward passes go from the last chunk to the first. With one chunk the schedule is 1F1B.
    """

    name = Schedule.INTERLEAVED_1F1B

    def num_ahead(self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int) -> int:
        """Return the forward passes before the first backward pass: two per later stage, a group per chunk but one.

        One pass per later stage would be enough if sends took no time; two hide them.
        """
        if num_chunks == 1:
            return super().num_ahead(num_stages, num_microbatches, stage, num_chunks)
        later, group = num_stages - 1 - stage, self.groups(num_stages, num_microbatches)[0]
        return 2 * later + (num_chunks - 1) * len(group)

    def groups(self, num_stages: int, num_microbatches: int) -> Sequence[range]:
        """Return the groups: `num_stages` micro-batches each, or more if there is a remainder.

        With smaller groups, stages would idle while a group's first micro-batch is on its way to the next chunk, which
        can take longer than plain 1F1B. With the warm-up of `num_ahead`, they could also wait for each other for ever:
        the first stage is up to 2 (num_stages - 1) forward passes ahead of the last, which only two groups on their
        way, forward and backward, make up for. If there are fewer micro-batches than stages, they are a single group,
        which never waits for another one. The larger groups come first, because the warm-up counts one of them for each
        chunk.
        """
        count = max(1, num_microbatches // num_stages)
        size, rest = divmod(num_microbatches, count)
        starts = [i * size + min(i, rest) for i in range(count + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def closed_forms(self, num_microbatches: int, num_chunks: int = 1) -> tuple[ClosedForm, ...]:
        """Return the coefficients for at least as many micro-batches as stages, and for fewer.

        v chunks per stage divide the time in which the pipeline fills and drains by v (Narayanan et al. 2021). With
        fewer micro-batches, all except the first take one chunk's time on the slowest stage.
        """
        if num_chunks == 1:
            return super().closed_forms(num_microbatches)
        v, m = num_chunks, num_microbatches
        return ClosedForm(1, m * v - 1, v, parts=v), ClosedForm(v, m - 1, v, parts=v)
