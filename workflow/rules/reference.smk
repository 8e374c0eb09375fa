# Published profiles of other systems, imported: `snakemake --cores 1 reference`. Needs a package index, once.
import json
import re

import yaml

REFERENCE = yaml.safe_load((ROOT / "config/reference/reference.yaml").read_text())
GALVATRON = REFERENCE["galvatron"]
FASOP = REFERENCE["fasop"]
# In its tables a model's profile is called by its own name, FASOP's by model and GPU.
FASOP_PROFILES = {
    f"fasop-{model}@{gpu}": (model, gpu)
    for model in FASOP["models"]
    for gpu in FASOP["gpus"]
}
REFERENCE_MODELS = {
    name: profile
    for name, profile in GALVATRON["profiles"].items()
    if "preset" in profile
} | {f"fasop-{name}": model for name, model in FASOP["models"].items()}


localrules:
    reference,
    reference_sdist,
    write_reference_config,


wildcard_constraints:
    described="|".join(map(re.escape, REFERENCE_MODELS)),
    flat="|".join(
        re.escape(name) for name, p in GALVATRON["profiles"].items() if "types" in p
    ),
    published="|".join(
        re.escape(name) for name, p in GALVATRON["profiles"].items() if "preset" in p
    ),
    fasop_profile="|".join(map(re.escape, FASOP_PROFILES)),
    machine="|".join(map(re.escape, GALVATRON["hardware"])),
    fasop_machine="|".join(map(re.escape, FASOP["hardware"])),
    length=r"\d+",


def galvatron_files(wildcards, name):
    profile = GALVATRON["profiles"][name]
    folder = (
        f"results/reference/hetu-galvatron/galvatron/models/{profile['folder']}/configs"
    )
    return (
        f"--computation {folder}/computation_profiling_bf16_{profile['files']}.json"
        f" --memory {folder}/memory_profiling_bf16_{profile['files']}.json"
        f" {'--repair' if profile.get('repair') else ''}"
    )


def micro_batch_sizes(name):
    return GALVATRON["profiles"][name].get(
        "micro_batch_sizes", GALVATRON["micro_batch_sizes"]
    )


def galvatron_tables(wildcards):
    folder = (
        "results/reference/hetu-galvatron/galvatron/profile_hardware/hardware_configs"
    )
    tables = GALVATRON["hardware"][wildcards.machine]
    names = {
        "allreduce": "allreduce_bandwidth",
        "p2p": "p2p_bandwidth",
        "sp_time": "sp_time",
    }
    options = [
        f"--{option.replace('_', '-')} {folder}/{name}_{size}_per_node.json"
        for option, name in names.items()
        for size in tables[option]
    ]
    return " ".join([*options, f"--overlap {folder}/overlap_coefficient.json"])


def reference_config(wildcards):
    """The Hugging Face configuration of a reference model: its preset's, with what differs."""
    model = REFERENCE_MODELS[wildcards.described]
    preset = yaml.safe_load(
        (ROOT / f"config/models/{model['preset']}.yaml").read_text()
    )
    return json.dumps({**preset["config"], **model.get("config", {})}, sort_keys=True)


rule reference:
    input:
        expand("results/reference/profiles/{name}.h5", name=GALVATRON["profiles"]),
        expand("results/reference/profiles/{name}.h5", name=FASOP_PROFILES),
        expand("results/reference/hardware/{name}.h5", name=GALVATRON["hardware"]),
        expand("results/reference/hardware/{name}.h5", name=FASOP["hardware"]),


rule reference_sdist:
    output:
        folder=directory("results/reference/hetu-galvatron"),
    log:
        "results/logs/reference/sdist.log",
    benchmark:
        "results/benchmarks/reference/sdist.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        line=f"{GALVATRON['requirement']} --hash=sha256:{GALVATRON['sha256']}",
        name=GALVATRON["requirement"].partition("==")[0],
    message:
        "fetch the tables of {params.name}"
    shell:
        "( mkdir -p {output.folder} && printf '%s\\n' {params.line:q} > {output.folder}/requirements.txt"
        " && python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary {params.name}"
        " --require-hashes --requirement {output.folder}/requirements.txt --dest {output.folder}"
        " && tar --extract --gzip --file {output.folder}/*.tar.gz --directory {output.folder} --strip-components=1"
        " --wildcards '*/configs/*_profiling_*.json' '*/configs/galvatron_config_*.json' '*/hardware_configs/*.json'"
        " && rm {output.folder}/*.tar.gz ) > {log} 2>&1"


rule write_reference_config:
    output:
        "results/reference/models/{described}/config.json",
    threads: 1
    resources:
        **LIGHT,
    params:
        text=reference_config,
    shell:
        "printf '%s\\n' {params.text:q} > {output}"


rule reference_model:
    input:
        config="results/reference/models/{described}/config.json",
    output:
        model="results/reference/models/{described}-{length}.json",
    log:
        "results/logs/reference/describe/{described}-{length}.log",
    benchmark:
        "results/benchmarks/reference/describe/{described}-{length}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=10,
    params:
        folder=lambda wildcards, input: Path(input.config).parent,
    message:
        "describe {wildcards.described} at {wildcards.length} positions"
    shell:
        "shardwright-train describe {params.folder} --name {wildcards.described}"
        " --sequence-length {wildcards.length} --out {output.model} 2> {log}"


rule reference_hardware:
    input:
        "results/reference/hetu-galvatron",
    output:
        hardware="results/reference/hardware/{machine}.h5",
    log:
        "results/logs/reference/hardware/{machine}.log",
    benchmark:
        "results/benchmarks/reference/hardware/{machine}.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        tables=galvatron_tables,
        device=GALVATRON["device"],
    message:
        "import Galvatron's tables of {wildcards.machine}"
    shell:
        "shardwright-profile import galvatron-hardware --cluster {wildcards.machine} --device {params.device}"
        " {params.tables} --out {output.hardware} 2> {log}"


rule reference_profile:
    input:
        "results/reference/hetu-galvatron",
        hardware=f"results/reference/hardware/{GALVATRON['traffic_of']}.h5",
        models=lambda wildcards: [
            f"results/reference/models/{wildcards.published}-{length}.json"
            for length in GALVATRON["profiles"][wildcards.published][
                "sequence_lengths"
            ]
        ],
    output:
        profile="results/reference/profiles/{published}.h5",
    log:
        "results/logs/reference/profiles/{published}.log",
    benchmark:
        "results/benchmarks/reference/profiles/{published}.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        files=lambda wildcards: galvatron_files(wildcards, wildcards.published),
        models=lambda wildcards, input: " ".join(
            f"--model {path}" for path in input.models
        ),
        device=GALVATRON["device"],
        ratio=REFERENCE["backward_ratio"],
        tp_sizes=GALVATRON["tp_sizes"],
        sizes=lambda wildcards: micro_batch_sizes(wildcards.published),
    message:
        "import Galvatron's profile of {wildcards.published}"
    shell:
        "shardwright-profile import galvatron {params.files} {params.models} --hardware {input.hardware}"
        " --device {params.device} --backward-ratio {params.ratio} --tp-sizes {params.tp_sizes}"
        " --micro-batch-sizes {params.sizes} --out {output.profile} 2> {log}"


rule reference_flat_profile:
    input:
        "results/reference/hetu-galvatron",
        hardware=f"results/reference/hardware/{GALVATRON['traffic_of']}.h5",
    output:
        profile="results/reference/profiles/{flat}.h5",
        model="results/reference/models/{flat}.json",
    log:
        "results/logs/reference/profiles/{flat}.log",
    benchmark:
        "results/benchmarks/reference/profiles/{flat}.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        files=lambda wildcards: galvatron_files(wildcards, wildcards.flat),
        types=lambda wildcards: " ".join(
            f"--type {kind}" for kind in GALVATRON["profiles"][wildcards.flat]["types"]
        ),
        device=GALVATRON["device"],
        ratio=REFERENCE["backward_ratio"],
        tp_sizes=GALVATRON["tp_sizes"],
        sizes=lambda wildcards: micro_batch_sizes(wildcards.flat),
    message:
        "import Galvatron's profile of {wildcards.flat}, with a description of its sizes"
    shell:
        "shardwright-profile import galvatron {params.files} {params.types} --name {wildcards.flat}"
        " --model-out {output.model} --hardware {input.hardware} --device {params.device}"
        " --backward-ratio {params.ratio} --tp-sizes {params.tp_sizes} --micro-batch-sizes {params.sizes}"
        " --out {output.profile} 2> {log}"


rule reference_fasop_hardware:
    input:
        constants=ROOT / "config/reference/fasop-constants.json",
    output:
        hardware="results/reference/hardware/{fasop_machine}.h5",
    log:
        "results/logs/reference/hardware/{fasop_machine}.log",
    benchmark:
        "results/benchmarks/reference/hardware/{fasop_machine}.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        machine=lambda wildcards: FASOP["hardware"][wildcards.fasop_machine],
    message:
        "import FASOP's bandwidths of {wildcards.fasop_machine}"
    shell:
        "shardwright-profile import fasop-hardware --constants {input.constants} --setting {params.machine[setting]}"
        " --gpu {params.machine[gpu]} --device {params.machine[gpu]} --nodes {params.machine[nodes]}"
        " --cluster {wildcards.fasop_machine} --out {output.hardware} 2> {log}"


rule reference_fasop_profile:
    input:
        times=ROOT / "config/reference/fasop-layer-times.csv",
        constants=ROOT / "config/reference/fasop-constants.json",
        model=lambda wildcards: "results/reference/models/fasop-{}-{}.json".format(
            FASOP_PROFILES[wildcards.fasop_profile][0],
            FASOP["models"][FASOP_PROFILES[wildcards.fasop_profile][0]][
                "sequence_length"
            ],
        ),
    output:
        profile="results/reference/profiles/{fasop_profile}.h5",
    log:
        "results/logs/reference/profiles/{fasop_profile}.log",
    benchmark:
        "results/benchmarks/reference/profiles/{fasop_profile}.tsv"
    threads: 1
    resources:
        **LIGHT,
    params:
        of=lambda wildcards: FASOP_PROFILES[wildcards.fasop_profile],
        ratio=REFERENCE["backward_ratio"],
        sizes=FASOP["micro_batch_sizes"],
    message:
        "import FASOP's layer times as {wildcards.fasop_profile}"
    shell:
        "shardwright-profile import fasop --times {input.times} --constants {input.constants}"
        " --model-name {params.of[0]} --gpu {params.of[1]} --device {params.of[1]} --model {input.model}"
        " --backward-ratio {params.ratio} --micro-batch-sizes {params.sizes} --out {output.profile} 2> {log}"
