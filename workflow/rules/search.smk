# From profiles to plans.
rule plans:
    input:
        expand("results/plans/{search}.json", search=CONFIG.settings.searches),
    localrule: True


rule search:
    input:
        cluster=lambda wildcards: f"results/clusters/{cluster_of_search(wildcards)}.json",
        model=lambda wildcards: f"results/models/{CONFIG.settings.searches[wildcards.search].model}.json",
        hardware=lambda wildcards: f"results/hardware/{cluster_of_search(wildcards)}.h5",
        profiles=profiles_of_search,
        search="results/searches/{search}.json",
        correction=lambda wildcards: CONFIG.corrections_of(wildcards.search),
        load=lambda wildcards: runs_of(CONFIG.settings, CONFIG.settings.searches[wildcards.search].imbalance),
    output:
        plan="results/plans/{search}.json",
        prediction="results/plans/{search}.prediction.json",
    log:
        "results/logs/search/{search}.log",
    benchmark:
        "results/benchmarks/search/{search}.tsv"
    priority: 1
    group:
        group_of_search
    conda:
        "../envs/plan.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        **COMPUTED,
        profiles=lambda wildcards, input: spelled_options({"profile": list(input.profiles)}),
        correction=lambda wildcards, input: spelled_options({"correction": list(input.correction)}),
        load=lambda wildcards: search_load(wildcards.search),
        load_sha256=lambda wildcards: load_sha256(
            CONFIG.settings, CONFIG.folder, CONFIG.settings.searches[wildcards.search].imbalance
        ),
    message:
        "search the plan {wildcards.search}"
    shell:
        "shardwright plan --cluster {input.cluster:q} --model {input.model:q} --hardware {input.hardware:q}"
        " {params.profiles:q} {params.correction:q} {params.load:q} --search {input.search:q} --out {output.plan:q} --runners-up"
        " 2> {log:q}"


rule grid:
    input:
        script=local(str(ROOT / "workflow/scripts/show.py")),
        plans=expand("results/plans/{search}.json", search=CONFIG.settings.searches),
        predictions=expand("results/plans/{search}.prediction.json", search=CONFIG.settings.searches),
    output:
        table=report("results/grid.csv", caption="../report/searches.rst", category="Plans and runs"),
    log:
        "results/logs/grid.log",
    benchmark:
        "results/benchmarks/grid.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        results=lambda wildcards, output: Path(output.table).parent,
        searches=[f"--search={search}" for search in CONFIG.settings.searches],
    message:
        "write the table of all plans"
    shell:
        "python {input.script:q} grid --results {params.results:q} {params.searches:q} --out {output.table:q} 2> {log:q}"
