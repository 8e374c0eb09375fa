# The configuration, the small files that are written from it, and what every rule shares.
import os
import sys
from pathlib import Path

ROOT = Path(workflow.basedir)
CONFIG_FILE = (
    os.path.relpath(workflow.overwrite_configfiles[-1])
    if workflow.overwrite_configfiles
    else "config/config.yaml"
)

sys.path.insert(0, str(ROOT / "workflow"))
from configuration import ConfigurationError, load_workflow  # noqa: E402

try:
    CONFIG = load_workflow(config, CONFIG_FILE, ROOT)
except ConfigurationError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


wildcard_constraints:
    cluster="[^/]+",
    model="[^/@]+",
    node_type="[^/@]+",
    profile="[^/]+",
    search="[^/]+?",
    run="[^/]+",
    data="[^/]+",
    length="[0-9]+",


localrules:
    write_cluster,
    write_model_config,
    write_profile_settings,
    write_search,
    picture,
    all,
    profiles,
    plans,
    runs,


def all_cores(_wildcards):
    """What is timed runs alone on this machine; on a cluster the job has its nodes to itself anyway."""
    # workflow.cores refuses to answer where no --cores was given, as with Slurm and in dry runs.
    return workflow.resource_settings.cores or 1


def on_nodes(node_types, num_nodes, runtime_min):
    """Resources of a job that starts ranks, from two functions of the wildcards: its node types and number of nodes."""

    def asked(name):
        return lambda wildcards: CONFIG.resources(
            node_types(wildcards)[0], num_nodes(wildcards), runtime_min
        ).get(name)

    return {name: asked(name) for name in CONFIG.resource_names()}


def on_cluster(cluster_of, runtime_min):
    """Resources of a job that runs on all of a cluster."""
    return on_nodes(
        lambda wildcards: CONFIG.node_types_of(cluster_of(wildcards)),
        lambda wildcards: CONFIG.num_nodes(cluster_of(wildcards)),
        runtime_min,
    )


def cluster_of_search(wildcards):
    return CONFIG["searches"][wildcards.search]["cluster"]


def profiles_of_search(wildcards):
    model = CONFIG["searches"][wildcards.search]["model"]
    node_types = CONFIG.node_types_of(cluster_of_search(wildcards))
    return [f"results/profiles/{model}@{node_type}.h5" for node_type in node_types]


def cluster_of_run(wildcards):
    return CONFIG["searches"][CONFIG["runs"][wildcards.run]["search"]]["cluster"]


# Each of these is written again only when its own part of the configuration changes.
rule write_cluster:
    output:
        "results/clusters/{cluster}.json",
    params:
        text=lambda wildcards: CONFIG.cluster_json(wildcards.cluster),
    shell:
        "printf '%s\\n' {params.text:q} > {output}"


rule write_model_config:
    output:
        "results/models/{model}/config.json",
    params:
        text=lambda wildcards: CONFIG.model_config_json(wildcards.model),
    shell:
        "printf '%s\\n' {params.text:q} > {output}"


rule write_profile_settings:
    output:
        "results/settings/{profile}.json",
    params:
        text=lambda wildcards: CONFIG.profile_json(wildcards.profile),
    shell:
        "printf '%s\\n' {params.text:q} > {output}"


rule write_search:
    output:
        "results/searches/{search}.json",
    params:
        text=lambda wildcards: CONFIG.search_json(wildcards.search),
    shell:
        "printf '%s\\n' {params.text:q} > {output}"
