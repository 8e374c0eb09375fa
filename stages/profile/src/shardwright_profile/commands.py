"""The commands `profile probes`, `model`, `fit`, `show` and `devices`."""

import shutil
import subprocess
import sys
from pathlib import Path

from shardwright.io import BadInput, RunFailed, read_document, write_document
from shardwright.types import Cluster, Measurement, Model
from shardwright.types.model_profile import ModelProfile, write_model_profile
from shardwright_profile.options import DevicesOptions, FitOptions, ModelOptions, ProbesOptions, ShowOptions

_SHARDWRIGHT = "shardwright"

# Each command imports what only it needs when it runs: several may run in one process.


def write_probes(options: ProbesOptions) -> None:
    """Write the probes of a model."""
    from shardwright.estimate.settings import ProfileSettings
    from shardwright_profile.model.probes import make_probes

    made = make_probes(
        [read_document(path, Model) for path in options.model],
        read_document(options.cluster, Cluster),
        options.node_type,
        read_document(options.settings, ProfileSettings),
    )
    for sentence in made.left_out:
        _say(f"left out: {sentence}")
    write_document(options.out, made.document)
    _say(f"{len(made.plans)} probes in {options.out}")


def profile_model(options: ModelOptions) -> None:
    """Profile a model on this node; intermediate files stay in `OUT.work` until the profile is written.

    Started again after it was stopped, it continues with the plans that are not yet measured. Raises BadInput if an
    input is wrong, SystemExit if the train stage refuses an input, and RunFailed if a command fails.
    """
    from shardwright.estimate.settings import ProfileSettings
    from shardwright_profile.model.fit import fit_profile
    from shardwright_profile.model.probes import make_probes

    settings = read_document(options.settings, ProfileSettings)
    cluster = read_document(options.cluster, Cluster)
    work = options.out.with_name(f"{options.out.name}.work")
    try:
        models = [_described(options, work, length) for length in settings.lengths(options.sequence_length)]
        made = make_probes(models, cluster, options.node_type, settings)
    except (BadInput, SystemExit):
        shutil.rmtree(work)
        raise
    for sentence in made.left_out:
        _say(f"left out: {sentence}")
    probes, measurement = work / "probes.json", work / "measurement.json"
    write_document(probes, made.document)
    shares = f", {len(made.context)} of them of shares of positions (cp_sizes)" if made.context else ""
    _say(f"{len(made.plans)} probes{shares}")
    _train(
        "measure",
        probes,
        *("--steps", options.steps, "--warmup-steps", options.warmup_steps, "--min-time-s", options.min_time_s),
        *("--out", measurement),
    )
    profile = fit_profile([(measurement, read_document(measurement, Measurement))])
    write_model_profile(options.out, profile)
    _say_context(profile)
    shutil.rmtree(work)


def _described(options: ModelOptions, work: Path, length: int) -> Model:
    work.mkdir(parents=True, exist_ok=True)
    file = work / f"{length}.json"
    trained = [word for part in options.frozen for word in ("--frozen", part)]
    trained += [] if options.lora is None else ["--lora", str(options.lora)]
    _train("describe", options.folder, "--name", options.name, "--sequence-length", length, *trained, "--out", file)
    return read_document(file, Model)


def _train(*arguments: object) -> None:
    """Run a command of the train stage, which reports on standard error; if it refuses an input, exit as it did."""
    installed = shutil.which(_SHARDWRIGHT) or shutil.which(_SHARDWRIGHT, path=str(Path(sys.executable).parent))
    if installed is None:
        raise BadInput("model", f"{_SHARDWRIGHT} is not installed here", "install it")
    words = ["train", *map(str, arguments)]
    _say(" ".join([_SHARDWRIGHT, *words]))
    code = subprocess.run([installed, *words], check=False).returncode
    if code == BadInput.exit_code:
        raise SystemExit(code)  # the command has said why, in one line
    if code != 0:
        raise RunFailed(f"{_SHARDWRIGHT} train {arguments[0]} ended with exit code {code}")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _say_context(profile: ModelProfile) -> None:
    """Print the ratios of measured to derived times under context parallelism, one line per row of the profile."""
    from shardwright_profile.model.fit import context_notes

    for sentence in context_notes(profile.context.rows):
        _say(sentence)


def fit(options: FitOptions) -> None:
    """Write the model profile fitted to measured probes."""
    from shardwright_profile.model.fit import fit_profile

    profile = fit_profile([(path, read_document(path, Measurement)) for path in options.measurements])
    write_model_profile(options.out, profile)
    _say_context(profile)


def show(options: ShowOptions) -> None:
    """Print a profile, and draw it if requested."""
    from shardwright_profile.show import draw_profile, show_profile

    if options.tables:
        show_profile(options.file)
    if options.picture is not None:
        draw_profile(options.file, options.picture)


def list_devices(options: DevicesOptions) -> None:
    """Print the table of devices."""
    from shardwright.command import show as print_text
    from shardwright.devices.table import device_lines, read_devices

    print_text("\n".join(device_lines(read_devices(options.devices))))
