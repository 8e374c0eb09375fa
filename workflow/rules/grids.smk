# Grids of searches in config/grids: `snakemake --cores all results/grids/galvatron.md`, or `grids` for all of them.
wildcard_constraints:
    grid=any_of(GRIDS),
    front="[^/]+",
    part="[0-9]+",


rule grids:
    input:
        expand("results/grids/{grid}.md", grid=GRIDS),
    localrule: True


# Many cells of a model on a cluster are searched in parts, which may run at the same time: --shardwright-array-jobs
# grid_part. Answers are also kept by what they depend on, where Snakemake does not delete them.
rule grid_part:
    input:
        unpack(lambda wildcards: GRIDS[wildcards.grid].waits_for(wildcards.model, wildcards.cluster)),
        cells="results/grids/{grid}/asked/{model}@{cluster}/{part}.json",
    output:
        answers="results/grids/{grid}/answers/{model}@{cluster}/{part}.json",
    log:
        "results/logs/grids/{grid}/{model}@{cluster}/{part}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/{model}@{cluster}/{part}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        words=lambda wildcards: [
            placed(word) for word in GRIDS[wildcards.grid].part_words(wildcards.model, wildcards.cluster)
        ],
        load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_sha256(wildcards.model),
    message:
        "search part {wildcards.part} of the cells of {wildcards.model} on {wildcards.cluster}: progress is in {log}"
    shell:
        "shardwright grid {input.cells:q} {params.words:q} --out {output.answers:q} > {log:q} 2>&1"


# All cells of a model on a cluster are one job, which also prices the published and the even plans.
rule grid_searches:
    input:
        unpack(lambda wildcards: GRIDS[wildcards.grid].waits_for(wildcards.model, wildcards.cluster)),
        parts=lambda wildcards: GRIDS[wildcards.grid].answered_parts(wildcards.model, wildcards.cluster),
        cells="results/grids/{grid}/asked/{model}@{cluster}.json",
        batch="results/grids/{grid}/commands/{model}@{cluster}.txt",
    output:
        answers="results/grids/{grid}/answers/{model}@{cluster}.json",
        plans=directory("results/grids/{grid}/plans/{model}@{cluster}"),
    log:
        "results/logs/grids/{grid}/{model}@{cluster}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/{model}@{cluster}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_sha256(wildcards.model),
    message:
        "search the cells of {wildcards.model} on {wildcards.cluster}: progress and time left are in {log}"
    shell:
        "mkdir -p {output.plans:q} && shardwright batch {input.batch:q} > {log:q} 2>&1"


# The folder contains plans in addition to the tables; old ones would be taken for points of the next front.
rule grid_front:
    input:
        unpack(lambda wildcards: GRIDS[wildcards.grid].front_waits_for(wildcards.front)),
        search="results/grids/{grid}/fronts/{front}.search.json",
    output:
        multiext("results/grids/{grid}/fronts/{front}/front", ".csv", ".h5", ".html"),
        report("results/grids/{grid}/fronts/{front}/front.svg", caption="../report/front.rst", category="Grids"),
    log:
        "results/logs/grids/{grid}/fronts/{front}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/fronts/{front}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
        words=lambda wildcards: [placed(word) for word in GRIDS[wildcards.grid].front_words(wildcards.front)],
        load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_sha256(
            GRIDS[wildcards.grid].settings.fronts[wildcards.front].model
        ),
    message:
        "search the front {wildcards.front}, step time against price: progress is in {log}"
    shell:
        "rm -rf {params.folder:q} && shardwright-search {params.words:q} > {log:q} 2>&1"


rule grid_plans:
    input:
        answers="results/grids/{grid}/answers/{model}@{cluster}.json",
        given="results/grids/{grid}/plans/{model}@{cluster}",
        script=local(str(ROOT / "workflow/scripts/grid_tables.py")),
    output:
        plans="results/grids/{grid}/measured/{model}@{cluster}.plans.json",
    log:
        "results/logs/grids/{grid}/plans/{model}@{cluster}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/plans/{model}@{cluster}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        kept=placed("results/cells"),
    message:
        "collect the plans of {wildcards.model} on {wildcards.cluster} that are to be measured"
    shell:
        "python {input.script:q} plans {input.answers:q} --folder {params.kept:q} --given {input.given:q}"
        " --out {output.plans:q} 2> {log:q}"


rule grid_measure:
    input:
        plans="results/grids/{grid}/measured/{model}@{cluster}.plans.json",
    output:
        measurement="results/grids/{grid}/measured/{model}@{cluster}.json",
    log:
        "results/logs/grids/{grid}/measured/{model}@{cluster}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/measured/{model}@{cluster}.tsv"
    conda:
        "../envs/train.yaml"
    threads: all_cores
    resources:
        **on_cluster(lambda wildcards: wildcards.cluster, 240),
    params:
        nodes=nodes_options(lambda wildcards: wildcards.cluster),
        measure=lambda wildcards: GRIDS[wildcards.grid].settings.measure,
    message:
        "measure the plans of {wildcards.model} on {wildcards.cluster}"
    shell:
        "on_nodes.sh {resources.node_groups:q}"
        " shardwright train measure {input.plans:q} {params.nodes:q} --steps {params.measure.steps:q}"
        " --warmup-steps {params.measure.warmup_steps:q} --out {output.measurement:q} 2> {log:q}"


rule grid_table:
    input:
        cells=lambda wildcards: GRIDS[wildcards.grid].parts("asked"),
        answers=lambda wildcards: GRIDS[wildcards.grid].parts("answers"),
        measured=lambda wildcards: GRIDS[wildcards.grid].measurements,
        fronts=lambda wildcards: GRIDS[wildcards.grid].fronts,
        published_times="results/grids/{grid}/published_times.json",
        script=local(str(ROOT / "workflow/scripts/grid_tables.py")),
    output:
        report("results/grids/{grid}.csv", caption="../report/grid.rst", category="Grids"),
        page="results/grids/{grid}.md",
    log:
        "results/logs/grids/{grid}.log",
    benchmark:
        "results/benchmarks/grids/{grid}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        options=lambda wildcards, input: spelled_options(
            {"measured": list(input.measured), "front": list(input.fronts)}
        ),
        kept=placed("results/cells"),
        tables=lambda wildcards, output: output[0].removesuffix(".csv"),
    message:
        "write the table of the grid {wildcards.grid}"
    shell:
        "python {input.script:q} tables {params.tables:q} --folder {params.kept:q} {params.options:q}"
        " --published-times {input.published_times:q} > {log:q} 2>&1"
