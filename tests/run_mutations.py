"""Mistakes in every package, each of which the tests named beside it find: python tests/run_mutations.py [NUMBERS].

A mistake changes the source of one module as it is imported (edited_modules.py); nothing is written. Each takes one
call of pytest, which has to fail. This module is the plugin of that call, too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from edited_modules import edit_modules

_NUMBER = "SHARDWRIGHT_MUTATION"
_FAILED = 1
"""Exit code of pytest when tests failed; others are of calls that tested nothing."""


class Mutation(NamedTuple):
    """A mistake, and what finds it."""

    what: str
    module: str
    old: str
    """Text that the module has once."""
    new: str
    tests: str
    """Arguments of pytest."""


_FORMATS, _SEARCH, _TRAIN = "tests/formats/test_formats_", "tests/search/test_search_", "tests/train/test_"
MUTATIONS = (
    Mutation(
        "types: groups need not divide the ranks that shard states", "shardwright.types.strategy",
        "self.shard_size in (1, ranks) or ranks % self.shard_size", "self.shard_size in (1, ranks)",
        f"{_FORMATS}axes.py {_FORMATS}messages.py {_FORMATS}hostile_json.py",
    ),
    Mutation(
        "io: columns of profiles have no checksum", "shardwright.io.hdf5",
        '"fletcher32": True', '"fletcher32": False', f"{_FORMATS}profile_round_trips.py -k checksum",
    ),
    Mutation(
        "io: a file is renamed before it is whole on the disk", "shardwright.io.json",
        "            sync_path(temporary)\n            os.replace(temporary, path)\n",
        "            os.replace(temporary, path)\n", f"{_FORMATS}atomic_writing.py",
    ),
    Mutation(
        "plan: the closed form forgets what follows the last backward pass", "shardwright.plan.schedules.schedule",
        "self.steady * slowest + self.once * exposed", "self.steady * slowest", f"{_FORMATS}schedule.py",
    ),
    Mutation(
        "plan: gradients are reduced once, whatever the plan says", "shardwright.plan.communication",
        "reductions = microbatches if reduce_every_microbatch else 1", "reductions = 1",
        f"{_FORMATS}messages.py",
    ),
    Mutation(
        "models: gradients go back through layers before all that is trained", "shardwright.models.frozen",
        "names, backward = list[str](), False", "names, backward = list[str](), True",
        "tests/models/test_frozen_parts.py",
    ),
    Mutation(
        "optimizers: states are read and not written", "shardwright.optimizers.registry",
        "return 2 * kept + ", "return kept + ", "tests/profile/test_analytic.py",
    ),
    Mutation(
        "estimate: a ring's all-reduce has the steps of a gather", "shardwright.estimate.hardware",
        "            return 2 * (group_size - 1)\n", "            return group_size - 1\n",
        "tests/profile/test_analytic.py",
    ),
    Mutation(
        "launch: the rank that failed last is named", "shardwright.launch.failure_report",
        "first = failed[0] if failed else None", "first = failed[-1] if failed else None",
        "tests/launch/test_failure_report.py",
    ),
    Mutation(
        "profile: a repeat counts for the median's interval that does not", "shardwright_profile.hardware.profile",
        "return max(1, k)", "return k + 1", "tests/profile/test_sweep_statistics.py",
    ),
    Mutation(
        "profile: a probe's time is that of its first rank", "shardwright_profile.model.probe_results",
        "return max(map(median_of, self.ranks))", "return median_of(self.ranks[0])", "tests/profile/test_fit.py",
    ),
    Mutation(
        "search: a chain of layers may hold more than the budget", "shardwright_search.solver.interleaved",
        "fits = self._peak_bytes(labels, *ends) <= problem.group.budget_bytes",
        "fits = self._peak_bytes(labels, *ends) < np.inf", f"{_SEARCH}brute_force.py -k interleaved_solver",
    ),
    Mutation(
        "search: least memory forgets the budget of a stage's devices", "shardwright_search.solver.min_memory",
        "MinMemory(peak, stage, group, peak - on.budget_bytes)", "MinMemory(peak, stage, group, peak)",
        f"{_SEARCH}brute_force.py -k least_memory",
    ),
    Mutation(
        "search: a certificate's bound leaves out plans that just fit", "shardwright_search.certificate.check",
        "longer.memory[:, :, 1] <= group.budget_bytes", "longer.memory[:, :, 1] <= 0.9 * group.budget_bytes",
        f"{_SEARCH}certificate.py",
    ),
    Mutation(
        "search: micro-batches that repeat themselves take no time", "shardwright_search.simulation.simulator",
        "step_ps + more * pace_ps", "step_ps", f"{_SEARCH}limits.py -k many_microbatches",
    ),
    Mutation(
        "train: the warm-up begins with a rate of zero", "shardwright_train.engine.learning_rate",
        "self.learning_rate * step / warmup", "self.learning_rate * (step - 1) / warmup", f"{_TRAIN}learning_rate.py",
    ),
    Mutation(
        "train: every epoch has the order of the first", "shardwright_train.data.sampling",
        "_keys(seed, int(epoch))", "_keys(seed, 0)", f"{_TRAIN}data_order.py {_TRAIN}data_sampling.py",
    ),
    Mutation(
        "train: norms of gradients are added, and not their squares", "shardwright_train.engine.optimizer",
        "(norms.square() / self._replicas).sum()", "(norms / self._replicas).sum()",
        f"{_TRAIN}optimizer_norm.py",
    ),
    Mutation(
        "workflow: defaults that are written out make another run", "configuration_normal",
        "if inside != defaults[name]", "if True", "tests/workflow/test_workflow_spelling.py",
    ),
    Mutation(
        "workflow: the number of workers makes other data", "configuration_normal",
        'if key != "workers"', "if key", "tests/workflow/test_workflow_spelling.py",
    ),
)  # fmt: skip


def main(numbers: list[int]) -> int:
    """Try mistakes by number, all by default; return the number of those that no test found."""
    missed, here = 0, Path(__file__).parent
    for number in numbers or range(len(MUTATIONS)):
        mutation = MUTATIONS[number]
        command = [sys.executable, *"-m pytest -q -x -p run_mutations -m".split(), "not long", *mutation.tests.split()]
        environment = os.environ | {_NUMBER: str(number), "PYTHONPATH": str(here)}
        done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True, check=False)
        by = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
        found = done.returncode == _FAILED and by
        missed += not found
        print(f"{number}: {mutation.what}: {f'found by {by[0]}' if found else 'MISSED'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(min(1, main([int(number) for number in sys.argv[1:]])))
if _NUMBER in os.environ:
    edit_modules({MUTATIONS[int(os.environ[_NUMBER])].module: [MUTATIONS[int(os.environ[_NUMBER])][2:4]]})
