# The configuration, and what all rules have in common.
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

# Derived from this file, since the main file is either the Snakefile of the clone or workflow/Snakefile.
ROOT = Path(str(workflow.current_basedir)).parents[1]
# A workflow that uses this one as a module passes the configuration, and names its own configuration file, if any.
IS_GIVEN = workflow.modifier.skip_configfile
FILES = workflow.overwrite_configfiles or (workflow.configfiles if IS_GIVEN else [])
CONFIG_FILE = os.path.relpath(FILES[-1]) if FILES else "config/config.yaml"
# The prefix of a module's inputs, outputs and logs.
PREFIX = workflow.modifier.path_modifier.prefix or ""


# Planning jobs needs the product: it is installed with Snakemake, or loaded into its process with `--sdm conda`.
conda: "../envs/plan.yaml"


sys.path.insert(0, str(ROOT / "workflow"))
from strict_yaml import RUN_MIN, UNREAD, any_of, check_configurations  # noqa: E402

if not (workflow.overwrite_configfiles or IS_GIVEN):
    check_configurations([Path(CONFIG_FILE)])

    configfile: CONFIG_FILE


# If rules are only linted, when Snakemake does not check its environment, there are no jobs: only Snakemake is needed, and
# the configuration is not read.
if not workflow.check_envvars:
    CONFIG, REFERENCE, RUNS, DATA, GRIDS = UNREAD, UNREAD, {}, {}, {}
else:
    sys.path += [str(folder) for folder in (ROOT / "core/src", *sorted(ROOT.glob("stages/*/src")))]
    try:
        from configuration import load_workflow, spelled_options, upgrade_versions
        from configuration_normal import (
            data_by_folder,
            files_of_run,
            identity_of_run,
            load_options,
            load_sha256,
            runs_by_folder,
            runs_of,
        )
        from grids import read_grids
        from reference import Reference
        from shardwright.io import one_line_errors
        from slurm_jobs import is_array, job_minutes, job_resources, signal_lead_s
    except ModuleNotFoundError as error:
        missing = f"error: {error.name}: is not installed where Snakemake is: make setup, and call .venv/bin/snakemake"
        print(missing, file=sys.stderr)
        sys.exit(2)

    with one_line_errors():
        CONFIG = load_workflow(config, CONFIG_FILE)
        GRIDS = read_grids([ROOT / "config", Path(CONFIG_FILE).parent], CONFIG)
    # The names of runs and data by the names of their folders, which are the wildcards.
    RUNS, DATA = runs_by_folder(CONFIG.settings), data_by_folder(CONFIG.settings)
    REFERENCE = Reference(ROOT)


report: "../report/workflow.rst"


# The image for --sdm apptainer; none is published, so a site names its own.
container: config.get("container")


# Folders of on_nodes.sh and resume.sh. No rule contains their paths, so that moving a clone reruns nothing. If Snakemake
# was called by its path and no environment is active, the commands of rules are next to its Python.
COMMANDS = [ROOT / "workflow/scripts"]
if shutil.which("shardwright") is None and (Path(sys.executable).parent / "shardwright").exists():
    COMMANDS.append(Path(sys.executable).parent)
shell.prefix(f"PATH={':'.join(shlex.quote(str(folder)) for folder in COMMANDS)}:$PATH; ")


wildcard_constraints:
    cluster="[^/]+",
    model="[^/@]+",
    node_type="[^/@]+",
    profile="[^/]+",
    search="[^/]+?",
    run=any_of(RUNS),
    data=any_of(DATA),
    name="[^/]+",
    described="[^/@]+(@[0-9]+)?",


# The resources of a job that computes little, in one process.
LIGHT = {"mem_mb": 2000, "runtime": 10}

# The first parameters of rules that compute and do not measure. None by default: a changed parameter reruns its rule.
COMPUTED = {"versions": upgrade_versions()} if CONFIG.settings.rerun_on_upgrade else {}


def placed(text):
    """Return a path below results/, or a command with such paths, with the prefix of this module's files."""
    return re.sub(r"(?<![^\s'])results/", f"{PREFIX}results/", str(text))


def found(word, files):
    """Return a word of a command; for a folder of one of `files`, where the job finds it: with storage, in a local copy."""
    folders = (str(Path(file).parent) for file in files)
    return next((folder for folder in folders if Path(folder).match(f"*/{word}")), placed(word))


def all_cores(_wildcards):
    """Return the threads of a timed job: all of this machine; on a cluster its nodes are not shared anyway."""
    # workflow.cores raises an error if no --cores was given, as with Slurm and in dry runs.
    return workflow.resource_settings.cores or 1


def profile_resources():
    """Return the resources that Snakemake's profile gives every job, by name, without quotes."""
    defaults = workflow.resource_settings.default_resources or {}
    return {name: str(default.raw).strip("'\"") for name, default in defaults.items()}


def on_nodes(components, runtime_min):
    """Return the resources of a job that starts ranks; `components`: a function from wildcards to its components."""

    def resource(name):
        return lambda wildcards: job_resources(components(wildcards), runtime_min, profile_resources()).get(name)

    return {name: resource(name) for name in CONFIG.resource_names()}


def on_cluster(cluster_of, runtime_min):
    """Return the resources of a job that runs on all nodes of a cluster."""
    return on_nodes(lambda wildcards: CONFIG.components(cluster_of(wildcards)), runtime_min)


def nodes_options(cluster_of):
    """Return a function that returns the options on nodes for a command that starts ranks on a whole cluster."""

    def options(wildcards):
        cluster = CONFIG.settings.clusters[cluster_of(wildcards)]
        return ["--all-nodes-here"] if cluster.all_nodes_here else []

    return options


def settings_of_run(wildcards):
    return CONFIG.settings.runs[RUNS[wildcards.run]]


def search_of_run(wildcards):
    return CONFIG.settings.searches[settings_of_run(wildcards).search]


def cluster_of_run(wildcards):
    return search_of_run(wildcards).cluster


def cluster_of_search(wildcards):
    return CONFIG.settings.searches[wildcards.search].cluster


def group_of_search(wildcards):
    """Return the group of a search's job; None if the search waits for a measurement or a run of another search.

    Also None if Slurm is asked for an array of searches, of which a group cannot be a part.
    """
    if is_array("search", workflow.executor_settings):
        return None
    waits_for = CONFIG.corrections_of(wildcards.search) + runs_of(
        CONFIG.settings, CONFIG.settings.searches[wildcards.search].imbalance
    )
    return None if waits_for else "search"


def profiles_of_search(wildcards):
    return CONFIG.profiles_of(CONFIG.settings.searches[wildcards.search])


def slurm_extra_of_run(wildcards, input):
    """Return `slurm_extra` of a run, with the signal that stops it in order while there is time.

    The time of the signal depends on the plan, which is read only if Slurm runs the job: elsewhere a damaged plan stops
    nothing.
    """
    components, run = CONFIG.components(cluster_of_run(wildcards)), settings_of_run(wildcards)
    if workflow.executor_plugin is None or workflow.executor_plugin.name not in ("shardwright", "slurm"):
        return job_resources(components, RUN_MIN, profile_resources())["slurm_extra"]
    checkpoints = Path(placed(f"results/checkpoints/{wildcards.run}"))
    parent = next((Path(placed(path)) for path in CONFIG.parents_of(RUNS[wildcards.run])), None)
    minutes = job_minutes(components, RUN_MIN)
    lead_s = signal_lead_s(Path(input.plan), Path(input.prediction), checkpoints, parent, run.grace_s, minutes)
    return job_resources(components, RUN_MIN, profile_resources(), f"--signal=TERM@{lead_s}")["slurm_extra"]


def outliving_options(wildcards):
    """Return the options of srun by which other nodes survive the loss of one, for a run that restarts lost nodes."""
    several = CONFIG.settings.clusters[cluster_of_run(wildcards)].num_machines > 1
    restarts = settings_of_run(wildcards).max_restarts
    return ["--no-kill", "--kill-on-bad-exit=0"] if several and restarts else []


def replan_options(wildcards):
    """Return the files from which the plan of a run was searched, for a run that replans when nodes are lost."""
    run, search = settings_of_run(wildcards), search_of_run(wildcards)
    if run.on_node_loss != "replan":
        return []
    return spelled_options(
        {
            "replan_hardware": placed(f"results/hardware/{search.cluster}.h5"),
            "replan_search": placed(f"results/searches/{run.search}.json"),
            "replan_profile": [placed(path) for path in CONFIG.profiles_of(search)],
        }
    ) + [word.replace("--", "--replan-", 1) for word in search_load(run.search)]


def search_load(search):
    """Return the option that gives the load of experts to the commands of a search."""
    words = load_options(CONFIG.settings, CONFIG.folder, CONFIG.settings.searches[search].imbalance)
    return [placed(word) for word in words]
