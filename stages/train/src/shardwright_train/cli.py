"""`shardwright-train`: describe a model, prepare text, train with a plan, measure plans."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.types.plan import Plan
from shardwright_launch.heartbeat import HANG_TIMEOUT_S, START_UP_S
from shardwright_launch.nodes import nodes_of
from shardwright_train.jobs import RunJob
from shardwright_train.optimizer.learning_rate import LearningRateSchedule
from shardwright_train.start import start_measure, start_run
from shardwright_train.support import check_supported, without_devices

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train a Transformer exactly as a plan says, and measure what plans take.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Count = Annotated[int | None, typer.Option(help="Number of nodes; default: as srun says, else 1.", min=1)]
NodeRank = Annotated[
    int | None,
    typer.Option(help="This node's place in the plan's cluster, from 0; default: as srun says, else 0.", min=0),
]
HangTimeout = Annotated[
    float,
    typer.Option(
        help="Longest time of one step in s, of the first one with building and loading, of any with saving; after it"
        f" all ranks' stacks are printed. Start-up has {START_UP_S:g} s of its own.",
        min=1,
    ),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of node 0, where there are several; its next port is used too. Not needed in srun."),
]


@app.command()
def describe(
    config_dir: Annotated[Path, typer.Argument(help="Folder with a Hugging Face config.json.")],
    name: Annotated[str, typer.Option(help="Name of the model in all later files.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens of one sample.", min=1)],
    out: Annotated[Path, typer.Option(help="Model description to write (JSON).")],
) -> None:
    """Describe a model for the planner: layer types, shapes, what must divide what. Builds no weights."""
    with one_line_errors():
        file = config_dir / "config.json"
        try:
            config = json.loads(file.read_bytes())
            family = config["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(file, f"no configuration with a model_type ({error})", "write one") from None
        from shardwright_train.models.registry import family_named

        try:
            model = family_named(family, file).describe(family, config, name, sequence_length)
        except (ValueError, TypeError) as error:
            raise BadInput(file, str(error), "correct the configuration") from None
        write_document(out, model)


@app.command()
def prepare(
    text: Annotated[str, typer.Option(help="Text file, folder of them, or `python-stdlib`: Python's own sources.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens of the byte-level BPE to train.", min=257)],
    out: Annotated[Path, typer.Option(help="Folder for tokenizer.json, tokens.bin, tokens.idx, data.json.")],
    glob: Annotated[str, typer.Option(help="Which files of the folder.")] = "*.py",
    max_mib: Annotated[float, typer.Option(help="Most text to take, in MiB.", min=0.01)] = 8.0,
) -> None:
    """Train a tokenizer on text and write the tokens in Megatron's indexed format."""
    with one_line_errors():
        from shardwright_train.data.prepare import prepare as prepare_text

        prepare_text(text, glob, vocab_size, max_mib, out)


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="Plan to train with (JSON).")],
    data: Annotated[Path, typer.Option(help="Folder that `prepare` wrote, or one of images.npy and labels.npy.")],
    steps: Annotated[int, typer.Option(help="Steps in all, resumed ones included.", min=1)],
    out: Annotated[Path, typer.Option(help="Folder for metrics.jsonl and DONE.json.")],
    checkpoints: Annotated[Path, typer.Option(help="Folder for checkpoints; kept by plan inside.")],
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 500,
    keep_checkpoints: Annotated[int, typer.Option(help="How many of the latest to keep.", min=1)] = 2,
    resume_from: Annotated[
        Path | None, typer.Option(help="Checkpoint folder (step-…) to continue; default: this plan's latest.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, per step.", min=0)] = 3e-4,
    learning_rate_schedule: Annotated[
        LearningRateSchedule, typer.Option(help="What follows the warm-up; wsd: constant, then a decay.")
    ] = LearningRateSchedule.COSINE,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up to the peak.", min=0)] = 0,
    final_fraction: Annotated[
        float, typer.Option(help="Where cosine, linear and wsd end, as a share of the peak.", min=0, max=1)
    ] = 0.1,
    decay_fraction: Annotated[
        float, typer.Option(help="How long wsd decays, as a share of all steps.", min=0, max=1)
    ] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="AdamW's decay of matrices, per learning rate.", min=0)] = 0.1,
    clip_norm: Annotated[float, typer.Option(help="Largest global 2-norm of gradients; 0: no clipping.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and sample order.", min=0)] = 0,
    hang_timeout_s: HangTimeout = HANG_TIMEOUT_S,
    nnodes: Count = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
) -> None:
    """Train; run the same command again to resume. Starts one process per device of this node itself.

    Exit codes: 0 done, 2 bad input or locked, 4 failed (NaN, dead rank, hang), 75 stopped in order, 130 second signal.
    """
    with one_line_errors():
        job = RunJob(
            plan=str(plan),
            data=str(data),
            out=str(out),
            checkpoints=str(checkpoints),
            resume_from=str(resume_from) if resume_from else None,
            steps=steps,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            learning_rate=learning_rate,
            learning_rate_schedule=learning_rate_schedule,
            warmup_steps=warmup_steps,
            final_fraction=final_fraction,
            decay_fraction=decay_fraction,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            seed=seed,
            hang_timeout_s=hang_timeout_s,
        )
        start_run(job, nodes_of(nnodes, node_rank, rendezvous, os.environ))


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(help="Plan to check (JSON).")],
) -> None:
    """Check a plan in one process, without its cluster: messages (bytes) and tensor memory (MiB) of every role.

    Simulates a step of one rank of each distinct role on tensors without data. Exit codes: 0 it fits, 2 the plan is not
    valid or cannot be run, 3 a rank lacks memory (the line says how much).
    """
    with one_line_errors():
        from rich.console import Console

        from shardwright_train.dry_run.check import check_roles, raise_if_too_large
        from shardwright_train.dry_run.report import print_checks
        from shardwright_train.models.registry import family_named

        found = read_document(plan, Plan)
        check_supported(found, plan)
        family = family_named(found.model.family, plan)

        def progress(done: int, total: int) -> None:
            print(f"simulated {done} of {total} roles", file=sys.stderr, flush=True)

        runnable, attention = without_devices(found)
        checks = check_roles(runnable, family, attention, progress)
        print_checks(found, checks, Console())
        raise_if_too_large(found, checks)


@app.command()
def measure(
    plans: Annotated[list[Path], typer.Argument(help="Files of plans; of a prediction, its runners-up.")],
    out: Annotated[Path, typer.Option(help="Measurement to write (JSON).")],
    steps: Annotated[
        int,
        typer.Option(help="Timed steps of each plan; up to 3 times as many where they scatter by over 10 %.", min=1),
    ] = 5,
    warmup_steps: Annotated[int, typer.Option(help="Steps before the timed ones.", min=1)] = 2,
    min_time_s: Annotated[
        float, typer.Option(help="Go on with each plan for so many seconds at least, whatever the steps.", min=0)
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Folder for Chrome traces, PLAN-HASH.rankN.json.gz for each plan and rank: PyTorch's profile of one"
            " more step, its passes named as in `forward microbatch 0 chunk 0`. ui.perfetto.dev opens them; each rank"
            " is a process of its own, so the `traceEvents` of several can be put together."
        ),
    ] = None,
    hang_timeout_s: HangTimeout = HANG_TIMEOUT_S,
    nnodes: Count = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
) -> None:
    """Run plans for some steps on random tokens and report time (s) and memory (bytes) of every rank.

    A measurement that was cut off goes on where it was when it is started again.
    """
    with one_line_errors():
        nodes = nodes_of(nnodes, node_rank, rendezvous, os.environ)
        start_measure(plans, out, steps, warmup_steps, nodes, hang_timeout_s, trace, min_time_s)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
