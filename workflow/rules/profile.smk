# Profiles of machines and models: measured; or, if the configuration says `analytic`, estimated and marked as such.
ruleorder: analytic_hardware > hardware
ruleorder: analytic_profile > fit


rule profiles:
    input:
        [f"results/hardware/{search.cluster}.h5" for search in CONFIG.settings.searches.values()],
        [f"results/profiles/{model}@{node_type}.h5" for model, node_type in CONFIG.profiled_pairs()],
    localrule: True


# A model or, as MODEL@LENGTH, the same model at another sequence length, for its profile.
rule describe:
    input:
        config=lambda wildcards: f"results/models/{wildcards.described.partition('@')[0]}/config.json",
    output:
        model="results/models/{described}.json",
    log:
        "results/logs/describe/{described}.log",
    benchmark:
        "results/benchmarks/describe/{described}.tsv"
    group:
        "describe"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=4000,
    params:
        **COMPUTED,
        folder=lambda wildcards, input: Path(input.config).parent,
        options=lambda wildcards: CONFIG.describe_options(wildcards.described),
    message:
        "describe the model {wildcards.described}"
    shell:
        "shardwright train describe {params.folder:q} {params.options:q} --out {output.model:q} 2> {log:q}"


rule hardware:
    input:
        cluster="results/clusters/unpriced/{cluster}.json",
    output:
        hardware="results/hardware/{cluster}.h5",
    log:
        "results/logs/hardware/{cluster}.log",
    benchmark:
        "results/benchmarks/hardware/{cluster}.tsv"
    conda:
        "../envs/train.yaml"
    threads: all_cores
    resources:
        **on_cluster(lambda wildcards: wildcards.cluster, runtime_min=60),
    params:
        nodes=nodes_options(lambda wildcards: wildcards.cluster),
        time_budget_s=lambda wildcards: CONFIG.sections["clusters"][wildcards.cluster]["hardware_time_budget_s"],
    message:
        "measure collectives and device rates on {wildcards.cluster}, for {params.time_budget_s} s"
    shell:
        "on_nodes.sh {resources.node_groups:q}"
        " shardwright profile hardware {params.nodes:q} --cluster {input.cluster:q}"
        " --time-budget {params.time_budget_s:q} --out {output.hardware:q} 2> {log:q}"


rule analytic_hardware:
    input:
        cluster="results/clusters/unpriced/{cluster}.json",
    output:
        hardware="results/hardware/{cluster}.h5",
    log:
        "results/logs/analytic_hardware/{cluster}.log",
    benchmark:
        "results/benchmarks/analytic_hardware/{cluster}.tsv"
    wildcard_constraints:
        cluster=CONFIG.analytic_clusters(),
    priority: 1  # seconds; what is measured may take minutes
    group:
        "analytic"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        **COMPUTED,
        network=lambda wildcards: CONFIG.network_options(wildcards.cluster),
    message:
        "estimate collectives and device rates on {wildcards.cluster}: analytic, not measured"
    shell:
        "shardwright profile analytic --cluster {input.cluster:q} {params.network:q}"
        " --hardware-out {output.hardware:q} 2> {log:q}"


rule analytic_profile:
    input:
        models=lambda wildcards: CONFIG.described(wildcards.model),
        cluster="results/clusters/1x{node_type}.json",
        settings=lambda wildcards: f"results/settings/{CONFIG.settings.models[wildcards.model].profile}.json",
    output:
        profile="results/profiles/{model}@{node_type}.h5",
    log:
        "results/logs/analytic_profile/{model}@{node_type}.log",
    benchmark:
        "results/benchmarks/analytic_profile/{model}@{node_type}.tsv"
    wildcard_constraints:
        model=CONFIG.analytic_models(),
    priority: 1  # seconds; what is measured may take minutes
    group:
        "analytic"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        **COMPUTED,
        models=lambda wildcards, input: spelled_options({"model": list(input.models)}),
        estimate=lambda wildcards: CONFIG.estimate_options(wildcards.model),
    message:
        "estimate the profile of {wildcards.model} on {wildcards.node_type}: analytic, not measured"
    shell:
        "shardwright profile analytic {params.models:q} --settings {input.settings:q} --cluster {input.cluster:q}"
        " --node-type {wildcards.node_type:q} {params.estimate:q} --out {output.profile:q} 2> {log:q}"


rule probes:
    input:
        models=lambda wildcards: CONFIG.described(wildcards.model),
        cluster="results/clusters/1x{node_type}.json",
        settings=lambda wildcards: f"results/settings/{CONFIG.settings.models[wildcards.model].profile}.json",
    output:
        probes="results/probes/{model}@{node_type}.json",
    log:
        "results/logs/probes/{model}@{node_type}.log",
    benchmark:
        "results/benchmarks/probes/{model}@{node_type}.tsv"
    group:
        "probes"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        **COMPUTED,
        models=lambda wildcards, input: spelled_options({"model": list(input.models)}),
    message:
        "choose the probes of {wildcards.model} on {wildcards.node_type}"
    shell:
        "shardwright profile probes {params.models:q} --cluster {input.cluster:q} --node-type {wildcards.node_type:q}"
        " --settings {input.settings:q} --out {output.probes:q} 2> {log:q}"


rule measure:
    input:
        probes="results/probes/{model}@{node_type}.json",
    output:
        measurement="results/measurements/probes/{model}@{node_type}.json",
    log:
        "results/logs/measure/{model}@{node_type}.log",
    benchmark:
        "results/benchmarks/measure/{model}@{node_type}.tsv"
    conda:
        "../envs/train.yaml"
    threads: all_cores
    resources:
        **on_nodes(lambda wildcards: CONFIG.one_node(wildcards.node_type), runtime_min=60),
    params:
        options=lambda wildcards: CONFIG.measure_options(wildcards.model),
    message:
        "measure {wildcards.model} on {wildcards.node_type}"
    shell:
        "on_nodes.sh {resources.node_groups:q}"
        " shardwright train measure {input.probes:q} {params.options:q}"
        " --out {output.measurement:q} 2> {log:q}"


rule fit:
    input:
        measurement="results/measurements/probes/{model}@{node_type}.json",
    output:
        profile="results/profiles/{model}@{node_type}.h5",
    log:
        "results/logs/fit/{model}@{node_type}.log",
    benchmark:
        "results/benchmarks/fit/{model}@{node_type}.tsv"
    group:
        "fit"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        **COMPUTED,
    message:
        "fit the profile of {wildcards.model} on {wildcards.node_type}"
    shell:
        "shardwright profile fit --measurements {input.measurement:q} --out {output.profile:q} 2> {log:q}"


rule picture:
    input:
        profile="results/profiles/{model}@{node_type}.h5",
    output:
        picture=report("results/pictures/{model}@{node_type}.svg", caption="../report/profile.rst", category="Profiles"),
    log:
        "results/logs/picture/{model}@{node_type}.log",
    benchmark:
        "results/benchmarks/picture/{model}@{node_type}.tsv"
    localrule: True
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    message:
        "draw the profile of {wildcards.model} on {wildcards.node_type}"
    shell:
        "shardwright profile show {input.profile:q} --no-tables --picture {output.picture:q} 2> {log:q}"
