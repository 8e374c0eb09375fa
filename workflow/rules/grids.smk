# Grids of searches, of config/grids: `snakemake --cores all results/grids/galvatron.md`, or `grids` for all of them.
from grids import GridFile, read_grids  # noqa: E402

with one_line_errors():
    GRIDS = read_grids([ROOT / "config", Path(CONFIG_FILE).parent], CONFIG)


wildcard_constraints:
    grid="|".join(GRIDS) or "(?!)",
    front="[^/]+",


rule grids:
    input:
        expand("results/grids/{grid}.md", grid=GRIDS),
    localrule: True


# All cells of a model on a cluster are one job. Answers are kept by what they rest on, beyond what Snakemake deletes.
rule grid_searches:
    input:
        unpack(lambda wildcards: GRIDS[wildcards.grid].inputs(wildcards.model, wildcards.cluster)._asdict()),
        cells="results/grids/{grid}/asked/{model}@{cluster}.json",
        load=lambda wildcards: GRIDS[wildcards.grid].load_of(wildcards.model).runs,
    output:
        answers="results/grids/{grid}/answers/{model}@{cluster}.json",
    log:
        "results/logs/grids/{grid}/{model}@{cluster}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/{model}@{cluster}.tsv"
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        profiles=grid_profiles,
        load=lambda wildcards: [placed(word) for word in GRIDS[wildcards.grid].load_of(wildcards.model).options],
        load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_of(wildcards.model).sha256,
        kept=placed("results/cells"),
    message:
        "search the cells of {wildcards.model} on {wildcards.cluster}: progress and time left are in {log}"
    shell:
        "shardwright-search grid {input.cells:q} --cluster {input.cluster:q} --model {input.model:q}"
        " {params.profiles:q} {params.load:q} --folder {params.kept:q}"
        " --out {output.answers:q} > {log:q} 2>&1"


for kind, lines_of, further in (
    ("published", GridFile.published_lines, ["results/reference/hetu-galvatron"]),
    ("even", GridFile.even_lines, []),
):

    rule:
        name:
            f"grid_{kind}_plans"
        input:
            unpack(lambda wildcards: GRIDS[wildcards.grid].inputs(wildcards.model, wildcards.cluster)._asdict()),
            *further,
            load=lambda wildcards: GRIDS[wildcards.grid].load_of(wildcards.model).runs,
        output:
            batch=f"results/grids/{{grid}}/{kind}/{{model}}@{{cluster}}.txt",
            plans=directory(f"results/grids/{{grid}}/{kind}/{{model}}@{{cluster}}"),
        log:
            f"results/logs/grids/{{grid}}/{kind}/{{model}}@{{cluster}}.log",
        benchmark:
            f"results/benchmarks/grids/{{grid}}/{kind}/{{model}}@{{cluster}}.tsv"
        resources:
            **LIGHT,
        params:
            lines=lambda wildcards, lines_of=lines_of: [
                placed(line) for line in lines_of(GRIDS[wildcards.grid], wildcards.model, wildcards.cluster)
            ],
            load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_of(wildcards.model).sha256,
        message:
            f"price the {kind} plans of {{wildcards.model}} on {{wildcards.cluster}}"
        shell:
            "mkdir -p {output.plans:q}; printf '%s\\n' {params.lines:q} > {output.batch:q};"
            " shardwright-search batch {output.batch:q} > {log:q} 2>&1"


# The folder has plans beside the tables, which would be taken for points of the next front.
rule grid_front:
    input:
        unpack(lambda wildcards: GRIDS[wildcards.grid].front_inputs(wildcards.front)._asdict()),
        search="results/grids/{grid}/fronts/{front}.search.json",
        load=lambda wildcards: GRIDS[wildcards.grid].load_of_front(wildcards.front).runs,
    output:
        multiext("results/grids/{grid}/fronts/{front}/front", ".csv", ".h5", ".html"),
        report("results/grids/{grid}/fronts/{front}/front.svg", caption="../report/front.rst", category="Grids"),
    log:
        "results/logs/grids/{grid}/fronts/{front}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/fronts/{front}.tsv"
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
        profiles=grid_profiles,
        load=lambda wildcards: [placed(word) for word in GRIDS[wildcards.grid].load_of_front(wildcards.front).options],
        load_sha256=lambda wildcards: GRIDS[wildcards.grid].load_of_front(wildcards.front).sha256,
    message:
        "search the front {wildcards.front}, step time against price: progress is in {log}"
    shell:
        "rm -rf {params.folder:q}; shardwright-search rent --cluster {input.cluster:q} --model {input.model:q}"
        " {params.profiles:q} {params.load:q} --search {input.search:q} --out {params.folder:q} > {log:q} 2>&1"


rule grid_measure:
    input:
        even=lambda wildcards: GRIDS[wildcards.grid].even_folders(wildcards.model, wildcards.cluster),
        answers="results/grids/{grid}/answers/{model}@{cluster}.json",
        script=ROOT / "workflow/scripts/grid_tables.py",
    output:
        measurement="results/grids/{grid}/measured/{model}@{cluster}.json",
        plans="results/grids/{grid}/measured/{model}@{cluster}.plans.json",
    log:
        "results/logs/grids/{grid}/measured/{model}@{cluster}.log",
    benchmark:
        "results/benchmarks/grids/{grid}/measured/{model}@{cluster}.tsv"
    threads: all_cores
    resources:
        **on_cluster(lambda wildcards: wildcards.cluster, 240),
    params:
        nodes=nodes_options(lambda wildcards: wildcards.cluster),
        even=lambda wildcards, input: spelled_options({"even": list(input.even)}),
        kept=placed("results/cells"),
        measure=lambda wildcards: GRIDS[wildcards.grid].settings.measure,
    message:
        "measure the plans of {wildcards.model} on {wildcards.cluster}"
    shell:
        "( python {input.script:q} plans {input.answers:q} --folder {params.kept:q} {params.even:q} --out {output.plans:q} &&"
        " on_nodes.sh {resources.node_groups:q}"
        " shardwright-train measure {output.plans:q} {params.nodes:q} --steps {params.measure.steps:q}"
        " --warmup-steps {params.measure.warmup_steps:q} --out {output.measurement:q} ) 2> {log:q}"


rule grid_table:
    input:
        cells=lambda wildcards: GRIDS[wildcards.grid].parts("asked"),
        answers=lambda wildcards: GRIDS[wildcards.grid].parts("answers"),
        published=lambda wildcards: GRIDS[wildcards.grid].published_folders,
        even=lambda wildcards: [
            folder for pair in GRIDS[wildcards.grid].pairs for folder in GRIDS[wildcards.grid].even_folders(*pair)
        ],
        measured=lambda wildcards: GRIDS[wildcards.grid].measurements,
        fronts=lambda wildcards: GRIDS[wildcards.grid].fronts,
        published_times="results/grids/{grid}/published_times.json",
        scripts=sorted((ROOT / "workflow/scripts").glob("*.py")),
    output:
        multiext("results/grids/{grid}", ".csv", ".h5", ".md", ".html"),
        report("results/grids/{grid}.svg", caption="../report/grid.rst", category="Grids"),
    log:
        "results/logs/grids/{grid}.log",
    benchmark:
        "results/benchmarks/grids/{grid}.tsv"
    resources:
        **LIGHT,
    params:
        script=ROOT / "workflow/scripts/grid_tables.py",
        measured=lambda wildcards, input: spelled_options({"measured": list(input.measured)}),
        fronts=lambda wildcards, input: spelled_options({"front": list(input.fronts)}),
        kept=placed("results/cells"),
        tables=lambda wildcards, output: output[0].removesuffix(".csv"),
    message:
        "write the tables of the grid {wildcards.grid}"
    shell:
        "python {params.script:q} tables {params.tables:q} --folder {params.kept:q} {params.measured:q}"
        " {params.fronts:q} --published-times {input.published_times:q} > {log:q} 2>&1"
