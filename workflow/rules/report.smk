# One page that says what was planned, what was predicted and what came of it.
rule report:
    input:
        scripts=sorted((ROOT / "workflow/scripts").glob("*.py")) + sorted((ROOT / "workflow/scripts").glob("*.css")),
        plans=expand("results/plans/{search}.json", search=CONFIG["searches"]),
        predictions=expand("results/plans/{search}.prediction.json", search=CONFIG["searches"]),
        measurements=expand("results/measurements/plans/{search}.json", search=CONFIG["validate"]["searches"]),
        runs=expand("results/runs/{run}/{file}", run=CONFIG["runs"], file=["metrics.jsonl", "DONE.json"]),
    output:
        page="results/report.html",
    params:
        script=ROOT / "workflow/scripts/report.py",
        searches=" ".join(CONFIG["searches"]),
        runs=" ".join(CONFIG["runs"]),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    shell:
        "python {params.script} --results results --searches {params.searches} --runs {params.runs}"
        " --out {output.page} 2> {log}"
