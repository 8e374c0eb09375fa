# One page that shows what was planned, what was predicted and what was measured.
rule report:
    input:
        scripts=[local(str(path)) for path in sorted((ROOT / "workflow/scripts").glob("*.py"))],
        plans=expand("results/plans/{search}.json", search=CONFIG.settings.searches),
        predictions=expand("results/plans/{search}.prediction.json", search=CONFIG.settings.searches),
        measurements=expand(
            "results/{folder}/{search}.json",
            folder=["measurements/plans", "corrections"],
            search=CONFIG.measured_searches(),
        ),
        runs=expand("results/runs/{run}/{file}", run=RUNS, file=["metrics.jsonl", "DONE.json"]),
        profiles=[
            f"results/{folder}/{model}@{node_type}.{kind}"
            for model, node_type in CONFIG.profiled_pairs()
            for folder, kind in (("profiles", "h5"), ("pictures", "svg"))
        ],
        pictures=list(CONFIG.settings.pictures),
    output:
        page=report("results/report.html", caption="../report/page.rst", category="Plans and runs"),
        numbers="results/report.json",
        summary=report("results/summary.txt", caption="../report/summary.rst", category="Plans and runs"),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        script=ROOT / "workflow/scripts/show.py",
        results=lambda wildcards, output: Path(output.page).parent,
        names=[
            *(f"--search={search}" for search in CONFIG.settings.searches),
            *(f"--run={run}" for run in RUNS),
        ],
        profiles=[f"--profile={'@'.join(pair)}" for pair in CONFIG.profiled_pairs()],
        pictures=[f"--picture={placed(path)}" for path in CONFIG.settings.pictures],
    message:
        "write the report"
    shell:
        "python {params.script:q} page --results {params.results:q} {params.names:q} {params.profiles:q} {params.pictures:q}"
        " --out {output.page:q} > {output.summary:q} 2> {log:q}"
