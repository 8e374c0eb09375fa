# Import of published profiles of other systems: `snakemake --cores 2 reference`. Needs a package index once.
wildcard_constraints:
    batch="describe|import",


rule reference:
    input:
        [path for path in REFERENCE.imported() if path.endswith(".h5")],
    localrule: True


rule reference_sdist:
    output:
        folder=directory("results/reference/hetu-galvatron"),
    log:
        "results/logs/reference/sdist.log",
    benchmark:
        "results/benchmarks/reference/sdist.tsv"
    localrule: True
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        requirement=lambda wildcards: REFERENCE.requirement,
        sha256=lambda wildcards: REFERENCE.sha256,
    message:
        "fetch the tables of {params.requirement}"
    shell:
        "fetch_sdist.sh {params.requirement:q} {params.sha256:q} {output.folder:q} > {log:q} 2>&1"


# All models in one process: starting Python, torch and transformers takes longer than describing the models.
rule reference_models:
    input:
        REFERENCE.configs(),
        batch="results/reference/describe.txt",
    output:
        REFERENCE.described(),
    log:
        "results/logs/reference/models.log",
    benchmark:
        "results/benchmarks/reference/models.tsv"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=4000,
    message:
        "describe the reference models"
    shell:
        "shardwright train batch {input.batch:q} 2> {log:q}"


rule reference_imports:
    input:
        REFERENCE.described(),
        "results/reference/hetu-galvatron",
        local(str(ROOT / "config/reference/fasop-layer-times.csv")),
        local(str(ROOT / "config/reference/fasop-constants.json")),
        local(str(ROOT / "config/reference/fasop-growth.json")),
        batch="results/reference/import.txt",
    output:
        REFERENCE.imported(),
    log:
        "results/logs/reference/imports.log",
    benchmark:
        "results/benchmarks/reference/imports.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    message:
        "import the tables of Galvatron and FASOP"
    shell:
        "shardwright profile batch {input.batch:q} 2> {log:q}"
