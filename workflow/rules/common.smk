# The configuration, and what every rule shares.
import os
import shlex
import sys
from pathlib import Path

# From this file: the workflow is called by the Snakefile of the clone or by workflow/Snakefile.
ROOT = Path(str(workflow.current_basedir)).parents[1]
CONFIG_FILE = (
    os.path.relpath(workflow.overwrite_configfiles[-1])
    if workflow.overwrite_configfiles
    else "config/config.yaml"
)

sys.path.insert(0, str(ROOT / "workflow"))
from configuration import load_workflow, spelled_options  # noqa: E402
from configuration_files import check_configurations  # noqa: E402
from slurm_jobs import job_resources  # noqa: E402
from slurm_states import know_heterogeneous_jobs  # noqa: E402
from stopping import signal_lead_s  # noqa: E402
from shardwright_formats.io import one_line_errors  # noqa: E402

if not workflow.overwrite_configfiles:
    with one_line_errors():
        check_configurations([Path(CONFIG_FILE)])

    configfile: CONFIG_FILE


with one_line_errors():
    CONFIG = load_workflow(config, CONFIG_FILE, ROOT)

if "snakemake_executor_plugin_slurm" in sys.modules:
    know_heterogeneous_jobs(sys.modules["snakemake_executor_plugin_slurm"])


# Of --sdm apptainer; none is published, so that a site names its own.
container: CONFIG.of.container


# Where rules find on_nodes.sh and resume.sh: in no rule's own text, so that a clone that is moved reruns nothing.
shell.prefix(f"PATH={shlex.quote(str(ROOT / 'workflow/scripts'))}:$PATH; ")


wildcard_constraints:
    cluster="[^/]+",
    model="[^/@]+",
    node_type="[^/@]+",
    profile="[^/]+",
    search="[^/]+?",
    run="[^/]+",
    data="[^/]+",
    name="[^/]+",
    described="[^/@]+(@[0-9]+)?",


localrules:
    picture,
    all,
    profiles,
    plans,
    runs,


# What a job asks for that computes little, in one process.
LIGHT = {"mem_mb": 2000, "runtime": 10}


def all_cores(_wildcards):
    """What is timed runs alone on this machine; on a cluster the job has its nodes to itself anyway."""
    # workflow.cores refuses to answer where no --cores was given, as with Slurm and in dry runs.
    return workflow.resource_settings.cores or 1


def profile_resources():
    """The resources that Snakemake's profile gives every job, by name, without quotes."""
    defaults = workflow.resource_settings.default_resources or {}
    return {name: str(of.raw).strip("'\"") for name, of in defaults.items()}


def on_nodes(components, runtime_min):
    """Resources of a job that starts ranks, from a function of the wildcards: what the job consists of."""

    def asked(name):
        return lambda wildcards: job_resources(
            components(wildcards), runtime_min, profile_resources()
        ).get(name)

    return {name: asked(name) for name in CONFIG.resource_names()}


def on_cluster(cluster_of, runtime_min):
    """Resources of a job that runs on all of a cluster."""
    return on_nodes(
        lambda wildcards: CONFIG.components(cluster_of(wildcards)), runtime_min
    )


def nodes_options(cluster_of):
    """What a command that starts ranks on all of a cluster is told of its nodes."""

    def said(wildcards):
        here = CONFIG.of.clusters[cluster_of(wildcards)].all_nodes_here
        return ["--all-nodes-here"] if here else []

    return said


def cluster_of_search(wildcards):
    return CONFIG.of.searches[wildcards.search].cluster


def profiles_of_search(wildcards):
    model = CONFIG.of.searches[wildcards.search].model
    node_types = CONFIG.of.clusters[cluster_of_search(wildcards)].node_types
    return [f"results/profiles/{model}@{node_type}.h5" for node_type in node_types]


def cluster_of_run(wildcards):
    return CONFIG.of.searches[CONFIG.of.runs[wildcards.run].search].cluster


def with_signal(runtime_min):
    """`slurm_extra` of a run: also the signal at which it is to stop in order, while there is time for it."""

    def asked(wildcards, input):
        components = CONFIG.components(cluster_of_run(wildcards))
        grace_s = CONFIG.of.runs[wildcards.run].grace_s
        files = Path(input.plan), Path(input.prediction)
        runtime = job_resources(components, runtime_min)["runtime"]
        signal = f"--signal=TERM@{signal_lead_s(*files, grace_s, runtime)}"
        asked_for = job_resources(components, runtime_min, profile_resources(), signal)
        return asked_for["slurm_extra"]

    return asked


def outliving_options(wildcards):
    """What srun is told besides where a run starts lost nodes anew: not to end the others."""
    several = CONFIG.of.clusters[cluster_of_run(wildcards)].num_machines > 1
    restarts = CONFIG.of.runs[wildcards.run].max_restarts
    return ["--no-kill", "--kill-on-bad-exit=0"] if several and restarts else []


def replan_options(wildcards):
    """What a run whose nodes may be lost searches another plan with: the files its own was searched with."""
    run = CONFIG.of.runs[wildcards.run]
    if run.on_node_loss != "replan":
        return []
    search = CONFIG.of.searches[run.search]
    profiles = [
        f"results/profiles/{search.model}@{node_type}.h5"
        for node_type in CONFIG.of.clusters[search.cluster].node_types
    ]
    return spelled_options(
        {
            "replan_hardware": f"results/hardware/{search.cluster}.h5",
            "replan_search": f"results/searches/{run.search}.json",
            "replan_profile": profiles,
        }
    )
