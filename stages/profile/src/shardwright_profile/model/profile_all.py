"""The command `model`: describe, probes, measure and fit, one after the other, for those who use no Snakemake."""

import shutil
import subprocess
import sys
from pathlib import Path

from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.io import BadInput, RunFailed, read_document, write_document
from shardwright_formats.types import Cluster, Measurement, Model
from shardwright_formats.types.model_profile import write_model_profile
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import make_probes
from shardwright_profile.options import ModelOptions

_TRAIN = "shardwright-train"


def profile_model(options: ModelOptions) -> None:
    """Profile a model on this node; intermediate files stay in `OUT.work` until the profile is written.

    Started again after an end, it goes on with the plans that are not yet measured. Raises BadInput where an input is
    wrong (also one that the train stage refuses) and RunFailed where a command fails.
    """
    settings = read_document(options.settings, ProfileSettings)
    cluster = read_document(options.cluster, Cluster)
    work = options.out.with_name(f"{options.out.name}.work")
    own, *further = settings.lengths(options.sequence_length)
    try:
        models = [_described(options, work, length) for length in (own, *further)]
        made = make_probes(models, cluster, options.node_type, settings)
    except (BadInput, SystemExit):
        shutil.rmtree(work)
        raise
    for sentence in made.left_out:
        _say(f"left out: {sentence}")
    probes, measurement = work / "probes.json", work / "measurement.json"
    write_document(probes, made.document)
    _say(f"{len(made.plans)} probes")
    _train(
        "measure",
        probes,
        *("--steps", options.steps, "--warmup-steps", options.warmup_steps, "--min-time-s", options.min_time_s),
        *("--out", measurement),
    )
    write_model_profile(options.out, fit_profile([(measurement, read_document(measurement, Measurement))]))
    shutil.rmtree(work)


def _described(options: ModelOptions, work: Path, length: int) -> Model:
    work.mkdir(parents=True, exist_ok=True)
    file = work / f"{length}.json"
    _train("describe", options.folder, "--name", options.name, "--sequence-length", length, "--out", file)
    return read_document(file, Model)


def _train(*arguments: object) -> None:
    """Run a command of the train stage, which reports on standard error; its error is this command's."""
    installed = shutil.which(_TRAIN) or shutil.which(_TRAIN, path=str(Path(sys.executable).parent))
    if installed is None:
        raise BadInput("model", f"{_TRAIN} is not installed here", "install shardwright-train")
    _say(" ".join([_TRAIN, *map(str, arguments)]))
    code = subprocess.run([installed, *map(str, arguments)], check=False).returncode
    if code == BadInput.exit_code:
        raise SystemExit(code)  # it has said why, in one line
    if code != 0:
        raise RunFailed(f"{_TRAIN} {arguments[0]} ended with exit code {code}")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
