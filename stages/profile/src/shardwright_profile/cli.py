"""The command line `shardwright-profile`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright_formats.io.errors import one_line_errors
from shardwright_profile.importers.commands import import_app

__all__ = ["main"]

# Each command imports what it needs when it runs: `--help` must not wait for numpy, h5py or rich tables.

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _about() -> None:
    """Measure hardware, write the probes of a model, fit model profiles, and show them."""


@app.command()
def hardware(
    cluster: Annotated[Path, typer.Option(help="The cluster, JSON (shardwright.cluster).")],
    time_budget: Annotated[float, typer.Option(min=0.001, help="Time for the sweep, start-up apart, in seconds.")],
    out: Annotated[Path, typer.Option(help="The hardware profile to write, HDF5; node 0 writes it.")],
    min_bytes: Annotated[int, typer.Option(min=4, help="Smallest message, in bytes.")] = 1024,
    max_bytes: Annotated[int, typer.Option(min=4, help="Largest message, if time allows, in bytes.")] = 256 * 1024**2,
    max_repeats: Annotated[int, typer.Option(min=1, help="Most repeats of each message, a number.")] = 100,
    nnodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; without it as srun says, else 1.")] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node's number, from 0; without it as srun says, else 0.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of node 0 where several nodes meet; not needed on one node, nor under srun."),
    ] = None,
) -> None:
    """Time messages and devices, and how they slow each other down: gloo among devices named `cpu`, else NCCL.

    Starts one process per device of this node. All groups of one size work at the same time, as in training. Messages
    grow fourfold, at least to 1 MiB, and as far as the time budget allows; each is repeated until its median is known
    to within 3 %, its share of the time is spent, or --max-repeats is reached. A sweep that was killed goes on when the
    same command is run again: what it has measured lies in OUT.journal until OUT is written.
    """
    with one_line_errors():
        from shardwright_profile.hardware.options import HardwareOptions
        from shardwright_profile.hardware.start import start_sweep

        start_sweep(
            HardwareOptions(
                cluster=cluster,
                time_budget=time_budget,
                out=out,
                min_bytes=min_bytes,
                max_bytes=max_bytes,
                max_repeats=max_repeats,
                nnodes=nnodes,
                node_rank=node_rank,
                rendezvous=rendezvous,
            )
        )


@app.command()
def probes(
    model: Annotated[
        list[Path],
        typer.Option(
            help="The model description, JSON (shardwright.model); once more for each further sequence length."
        ),
    ],
    cluster: Annotated[Path, typer.Option(help="The cluster, JSON (shardwright.cluster).")],
    node_type: Annotated[str, typer.Option(help="The cluster's node type to measure on, with all its devices.")],
    settings: Annotated[Path, typer.Option(help="What to probe, JSON (shardwright.profile_settings).")],
    out: Annotated[Path, typer.Option(help="The probes to write, JSON (shardwright.plans).")],
) -> None:
    """Write the plans of few layers from which `fit` learns what one layer costs."""
    with one_line_errors():
        from shardwright_formats.io.json import read_document, write_document
        from shardwright_formats.types.cluster import Cluster
        from shardwright_formats.types.model import Model
        from shardwright_formats.types.plan import Plans
        from shardwright_profile.model.probes import make_probes
        from shardwright_profile.model.settings import ProfileSettings

        made = make_probes(
            [read_document(path, Model) for path in model],
            read_document(cluster, Cluster),
            node_type,
            read_document(settings, ProfileSettings),
        )
        for sentence in made.left_out:
            print(f"left out: {sentence}", file=sys.stderr)
        write_document(out, Plans(plans=made.plans))
        print(f"{len(made.plans)} probes in {out}", file=sys.stderr)


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="Folder that holds a Hugging Face config.json.")],
    name: Annotated[str, typer.Option(help="What the model is called; the profile carries it.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens (or patches) of one sample.")],
    cluster: Annotated[Path, typer.Option(help="The cluster, JSON (shardwright.cluster).")],
    node_type: Annotated[str, typer.Option(help="The cluster's node type to measure on: this node, all its devices.")],
    settings: Annotated[Path, typer.Option(help="What to probe, JSON (shardwright.profile_settings).")],
    out: Annotated[Path, typer.Option(help="The model profile to write, HDF5.")],
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each probe, at least.")] = 5,
    warmup_steps: Annotated[int, typer.Option(min=1, help="Steps before the timed ones.")] = 2,
    min_time_s: Annotated[float, typer.Option(min=0, help="Time of each probe, at least, in seconds.")] = 1.0,
) -> None:
    """Profile a model in one go: describe it, write its probes, measure them on this node, and fit.

    Needs shardwright-train. What was measured is kept in OUT.work until the profile is there: started again, the
    command goes on.
    """
    with one_line_errors():
        from shardwright_profile.model.profile_all import ModelRequest, profile_model

        profile_model(
            ModelRequest(
                folder,
                name,
                sequence_length,
                cluster,
                node_type,
                settings,
                steps,
                warmup_steps,
                min_time_s,
                out,
            )
        )


@app.command()
def fit(
    measurements: Annotated[
        list[Path], typer.Option(help="What the probes took, JSON (shardwright.measurement); may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The model profile to write, HDF5.")],
) -> None:
    """Turn the measured probes of one model on one device into its profile: seconds and bytes per layer."""
    with one_line_errors():
        from shardwright_formats.io.json import read_document
        from shardwright_formats.types.measurement import Measurement
        from shardwright_formats.types.model_profile import write_model_profile
        from shardwright_profile.model.fit import fit_profile

        write_model_profile(out, fit_profile([(path, read_document(path, Measurement)) for path in measurements]))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A hardware profile or a model profile, HDF5.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw points, fits and residuals too, into this file: .svg; .png and .pdf need CairoSVG."),
    ] = None,
    tables: Annotated[bool, typer.Option(help="Whether to print the tables.")] = True,
) -> None:
    """Print a profile as tables: times in s, ms or µs, memory in KiB, MiB or GiB, bandwidth in MB/s or GB/s."""
    with one_line_errors():
        from shardwright_profile.show.tables import draw_profile, show_profile

        if tables:
            show_profile(file)
        if picture is not None:
            draw_profile(file, picture)


app.add_typer(import_app, name="import")


@app.command()
def analytic(
    model: Annotated[
        list[Path] | None,
        typer.Option(help="The model, JSON (shardwright.model); repeated, the same model at other sequence lengths."),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="What to estimate, JSON (shardwright.profile_settings), as `probes` takes it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The model profile to write, HDF5.")] = None,
    device: Annotated[str | None, typer.Option(help="A device of `devices`, by its key or its driver's name.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="The cluster, JSON (shardwright.cluster).")] = None,
    node_type: Annotated[str | None, typer.Option(help="The cluster's node type whose device it is.")] = None,
    hardware_out: Annotated[Path | None, typer.Option(help="The cluster's hardware profile to write, HDF5.")] = None,
    inter_node_gbit_s: Annotated[
        float | None, typer.Option(min=0.001, help="What one node sends to others, all devices together, in Gbit/s.")
    ] = None,
    matrix_efficiency: Annotated[
        float, typer.Option(min=0.001, max=1, help="Reached over published rate of matrix products.")
    ] = 0.6,
    memory_efficiency: Annotated[
        float, typer.Option(min=0.001, max=1, help="Reached over published memory bandwidth.")
    ] = 0.75,
    link_efficiency: Annotated[
        float, typer.Option(min=0.001, max=1, help="Reached over published bandwidth of links and networks.")
    ] = 0.75,
    matrix_tflop_s: Annotated[
        float | None, typer.Option(min=0.001, help="Published rate of matrix products, for the table's, in TFLOP/s.")
    ] = None,
    memory_gbyte_s: Annotated[
        float | None, typer.Option(min=0.001, help="Published memory bandwidth, for the table's, in GB/s.")
    ] = None,
    link_gbyte_s: Annotated[
        float | None, typer.Option(min=0.001, help="Published link bandwidth one way, for the table's, in GB/s.")
    ] = None,
    devices: Annotated[Path | None, typer.Option(help="Another table of devices, TOML.")] = None,
) -> None:
    """Estimate profiles of devices that nobody has measured yet, from shapes and published rates.

    Every number is marked `analytic`, and the notes of the file say what was assumed and how far such numbers were from
    measured ones. Measured profiles are to be preferred wherever there are devices to measure on.
    """
    with one_line_errors():
        from shardwright_profile.analytic.rates import Efficiencies
        from shardwright_profile.analytic.request import AnalyticRequest, write_analytic

        write_analytic(
            AnalyticRequest(
                models=tuple(model or ()),
                settings=settings,
                out=out,
                device=device,
                cluster=cluster,
                node_type=node_type,
                hardware_out=hardware_out,
                inter_node_gbit_s=inter_node_gbit_s,
                efficiencies=Efficiencies(matrix_efficiency, memory_efficiency, link_efficiency),
                matrix_tflop_s=matrix_tflop_s,
                memory_gbyte_s=memory_gbyte_s,
                link_gbyte_s=link_gbyte_s,
                devices=devices,
            )
        )


@app.command(name="devices")
def list_devices(
    devices: Annotated[Path | None, typer.Option(help="Another table of devices, TOML.")] = None,
) -> None:
    """List the devices that `analytic` knows, with the source of each figure; prices are indicative."""
    with one_line_errors():
        from shardwright_profile.analytic.devices import device_lines, read_devices

        print("\n".join(device_lines(read_devices(devices))))


def main() -> None:
    """Run the command line."""
    app()
