# The small files that are written from the configuration and its grids and that the stages read.
# Each of these files is written again only when its own part of the configuration changes.
rule write_cluster:
    output:
        "results/clusters/{name}.json",
    log:
        "results/logs/clusters/{name}.log",
    localrule: True
    conda:
        "../envs/plan.yaml"
    params:
        text=lambda wildcards: CONFIG.cluster_json(wildcards.name),
    shell:
        "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"


use rule write_cluster as write_unpriced_cluster with:
    output:
        "results/clusters/unpriced/{name}.json",
    log:
        "results/logs/clusters/unpriced/{name}.log",
    localrule: True
    params:
        text=lambda wildcards: CONFIG.cluster_json(wildcards.name, priced=False),


use rule write_cluster as write_model_config with:
    output:
        "results/models/{name}/config.json",
    log:
        "results/logs/models/{name}/config.log",
    localrule: True
    params:
        text=lambda wildcards: CONFIG.model_config_json(wildcards.name),


use rule write_cluster as write_profile_settings with:
    output:
        "results/settings/{name}.json",
    log:
        "results/logs/settings/{name}.log",
    localrule: True
    params:
        text=lambda wildcards: CONFIG.profile_json(wildcards.name),


use rule write_cluster as write_search with:
    output:
        "results/searches/{name}.json",
    log:
        "results/logs/searches/{name}.log",
    localrule: True
    params:
        text=lambda wildcards: CONFIG.search_json(wildcards.name),


use rule write_cluster as write_blend with:
    output:
        "results/data/{data}/blend.json",
    log:
        "results/logs/data/{data}/blend.log",
    localrule: True
    params:
        text=lambda wildcards: CONFIG.blend_json(DATA[wildcards.data]),


use rule write_cluster as write_run_settings with:
    output:
        "results/runs/{run}/settings.json",
    log:
        "results/logs/runs/{run}/settings.log",
    localrule: True
    params:
        text=lambda wildcards: json.dumps(identity_of_run(CONFIG.settings, RUNS[wildcards.run])),


use rule write_cluster as write_grid_cells with:
    output:
        "results/grids/{grid}/asked/{model}@{cluster}.json",
    log:
        "results/logs/grids/{grid}/asked/{model}@{cluster}.log",
    localrule: True
    params:
        text=lambda wildcards: GRIDS[wildcards.grid].cells_json(wildcards.model, wildcards.cluster),


use rule write_cluster as write_grid_part with:
    output:
        "results/grids/{grid}/asked/{model}@{cluster}/{part}.json",
    log:
        "results/logs/grids/{grid}/asked/{model}@{cluster}/{part}.log",
    localrule: True
    params:
        text=lambda wildcards: GRIDS[wildcards.grid].part_json(wildcards.model, wildcards.cluster, int(wildcards.part)),


use rule write_cluster as write_grid_cluster with:
    output:
        "results/grids/{grid}/clusters/{cluster}.json",
    log:
        "results/logs/grids/{grid}/clusters/{cluster}.log",
    localrule: True
    params:
        text=lambda wildcards: GRIDS[wildcards.grid].cluster_json(wildcards.cluster),


use rule write_cluster as write_grid_published_times with:
    output:
        "results/grids/{grid}/published_times.json",
    log:
        "results/logs/grids/{grid}/published_times.log",
    localrule: True
    params:
        text=lambda wildcards: GRIDS[wildcards.grid].published_times_json,


use rule write_cluster as write_grid_front with:
    output:
        "results/grids/{grid}/fronts/{front}.search.json",
    log:
        "results/logs/grids/{grid}/fronts/{front}.search.log",
    localrule: True
    params:
        text=lambda wildcards: GRIDS[wildcards.grid].front_json(wildcards.front),


# The commands of a batch, one per line.
use rule write_cluster as write_grid_commands with:
    output:
        "results/grids/{grid}/commands/{model}@{cluster}.txt",
    log:
        "results/logs/grids/{grid}/commands/{model}@{cluster}.log",
    localrule: True
    params:
        text=lambda wildcards: [
            placed(line) for line in GRIDS[wildcards.grid].commands(wildcards.model, wildcards.cluster)
        ],


use rule write_cluster as write_reference_config with:
    output:
        "results/reference/models/{name}/config.json",
    log:
        "results/logs/reference/models/{name}.log",
    localrule: True
    params:
        text=lambda wildcards: REFERENCE.config_json(wildcards.name),


use rule write_cluster as write_reference_commands with:
    output:
        "results/reference/{batch}.txt",
    log:
        "results/logs/reference/{batch}.log",
    localrule: True
    params:
        text=lambda wildcards: [placed(line) for line in REFERENCE.lines(wildcards.batch)],
