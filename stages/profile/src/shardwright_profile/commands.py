"""The commands `probes`, `fit`, `show` and `devices` of shardwright-profile."""

import sys

from shardwright_formats.io import read_document, write_document
from shardwright_formats.types import Cluster, Measurement, Model
from shardwright_formats.types.model_profile import write_model_profile
from shardwright_profile.options import DevicesOptions, FitOptions, ProbesOptions, ShowOptions

# Each imports what only it needs when it runs: several may run in one process.


def write_probes(options: ProbesOptions) -> None:
    """Write the probes of a model."""
    from shardwright_estimate.settings import ProfileSettings
    from shardwright_profile.model.probes import make_probes

    made = make_probes(
        [read_document(path, Model) for path in options.model],
        read_document(options.cluster, Cluster),
        options.node_type,
        read_document(options.settings, ProfileSettings),
    )
    for sentence in made.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    write_document(options.out, made.document)
    print(f"{len(made.plans)} probes in {options.out}", file=sys.stderr)


def fit(options: FitOptions) -> None:
    """Write the model profile fitted to measured probes."""
    from shardwright_profile.model.fit import fit_profile

    profile = fit_profile([(path, read_document(path, Measurement)) for path in options.measurements])
    write_model_profile(options.out, profile)


def show(options: ShowOptions) -> None:
    """Print a profile, and draw it."""
    from shardwright_profile.show import draw_profile, show_profile

    if options.tables:
        show_profile(options.file)
    if options.picture is not None:
        draw_profile(options.file, options.picture)


def list_devices(options: DevicesOptions) -> None:
    """Print the table of devices."""
    from shardwright_estimate.devices import device_lines, read_devices
    from shardwright_formats.command import show as print_text

    print_text("\n".join(device_lines(read_devices(options.devices))))
