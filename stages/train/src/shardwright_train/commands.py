"""The commands that start no ranks: describe a model, prepare text, check a plan."""

import sys

from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.types.plan import Plan
from shardwright_train.models.describe import describe_folder
from shardwright_train.options import CheckOptions, DescribeOptions, PrepareOptions
from shardwright_train.support import check_supported, without_devices

__all__ = ["check", "describe", "prepare_text"]

# Each imports what only it needs when it runs: several may run in one process.


def describe(options: DescribeOptions) -> None:
    """Write the description of a model."""
    write_document(options.out, describe_folder(options.config_dir, options.name, options.sequence_length))


def prepare_text(options: PrepareOptions) -> None:
    """Write a tokenizer and the tokens of a text."""
    from shardwright_train.data.prepare import prepare

    prepare(options.text, options.glob, options.vocab_size, options.max_mib, options.out)


def check(options: CheckOptions) -> None:
    """Print what a plan would do on every role; NothingFits where a rank lacks memory."""
    from rich.console import Console

    from shardwright_train.dry_run.check import check_roles, raise_if_too_large
    from shardwright_train.dry_run.report import print_checks
    from shardwright_train.models.registry import family_named

    plan = read_document(options.plan, Plan)
    check_supported(plan, options.plan)
    family = family_named(plan.model.family, options.plan)

    def progress(done: int, total: int) -> None:
        print(f"simulated {done} of {total} roles", file=sys.stderr, flush=True)

    runnable, attention = without_devices(plan)
    checks = check_roles(runnable, family, attention, progress)
    print_checks(plan, checks, Console())
    raise_if_too_large(plan, checks)
