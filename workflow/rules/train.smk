# From plans to trained models, and the check of predictions.
rule runs:
    input:
        [files_of_run(CONFIG.settings, run) for run in RUNS.values()],
    localrule: True


# The files of one run by its name, whatever its folder is: `snakemake --cores all results/runs/demo.done`.
rule train:
    input:
        lambda wildcards: files_of_run(CONFIG.settings, wildcards.run_name),
    output:
        touch("results/runs/{run_name}.done"),
    wildcard_constraints:
        run_name=any_of(CONFIG.settings.runs),
    localrule: True


rule prepare:
    output:
        tokenizer="results/data/{data}/tokenizer.json",
        tokens="results/data/{data}/tokens.bin",
        index="results/data/{data}/tokens.idx",
        data="results/data/{data}/data.json",
    log:
        "results/logs/prepare/{data}.log",
    benchmark:
        "results/benchmarks/prepare/{data}.tsv"
    wildcard_constraints:
        data=CONFIG.data_pattern("text"),
    conda:
        "../envs/train.yaml"
    threads: lambda wildcards: CONFIG.settings.data[DATA[wildcards.data]].workers or 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
        options=lambda wildcards: CONFIG.options("data", DATA[wildcards.data], without=("workers",)),
    message:
        "tokenize the text {wildcards.data}"
    shell:
        "shardwright train prepare {params.options:q} --workers {threads:q} --out {params.folder:q} 2> {log:q}"


use rule prepare as prepare_completions with:
    output:
        tokenizer="results/data/{data}/tokenizer.json",
        tokens="results/data/{data}/tokens.bin",
        index="results/data/{data}/tokens.idx",
        targets="results/data/{data}/targets.bin",
        data="results/data/{data}/data.json",
    log:
        "results/logs/prepare_completions/{data}.log",
    benchmark:
        "results/benchmarks/prepare_completions/{data}.tsv"
    wildcard_constraints:
        data=CONFIG.data_pattern("completions"),
    message:
        "tokenize the prompts and completions {wildcards.data}"


use rule prepare as prepare_images with:
    output:
        images="results/data/{data}/images.npy",
        labels="results/data/{data}/labels.npy",
        classes="results/data/{data}/classes.json",
    log:
        "results/logs/prepare_images/{data}.log",
    benchmark:
        "results/benchmarks/prepare_images/{data}.tsv"
    wildcard_constraints:
        data=CONFIG.data_pattern("images"),
    message:
        "decode the images {wildcards.data}"


use rule prepare as prepare_pairs with:
    output:
        tokens="results/data/{data}/tokens.npy",
        samples="results/data/{data}/samples.npy",
        tokenizer="results/data/{data}/tokenizer.json",
    log:
        "results/logs/prepare_pairs/{data}.log",
    benchmark:
        "results/benchmarks/prepare_pairs/{data}.tsv"
    wildcard_constraints:
        data=CONFIG.data_pattern("pairs"),
    message:
        "read the images or recordings {wildcards.data} and their texts"


# A run is identified by its folder, whose name has a hash of the run's settings and data: with other settings or data a new
# run begins in another folder. Checkpoints are not outputs, since Snakemake would delete them before a run continues. Their
# folder is named by what the plan executes: a plan that executes something else starts from the beginning, a plan with only
# another price does not. A run that stops in order (exit code 75) is resumed at most ten times.
rule run:
    input:
        plan=lambda wildcards: f"results/plans/{settings_of_run(wildcards).search}.json",
        data=lambda wildcards: CONFIG.data_files(RUNS[wildcards.run]),
        settings="results/runs/{run}/settings.json",
        # It says how long a step may take; a change of it is no reason to train again.
        prediction=lambda wildcards: ancient(f"results/plans/{settings_of_run(wildcards).search}.prediction.json"),
    output:
        metrics="results/runs/{run}/metrics.jsonl",
        done="results/runs/{run}/DONE.json",
    log:
        "results/logs/run/{run}.log",
    benchmark:
        "results/benchmarks/run/{run}.tsv"
    conda:
        "../envs/train.yaml"
    threads: all_cores
    resources:
        **(on_cluster(cluster_of_run, runtime_min=RUN_MIN) | {"slurm_extra": slurm_extra_of_run}),
    params:
        folder=lambda wildcards, output: Path(output.done).parent,
        data=lambda wildcards, input: found(CONFIG.data_folder(settings_of_run(wildcards).data), input.data),
        checkpoints=lambda wildcards: placed(f"results/checkpoints/{wildcards.run}"),
        logs=lambda wildcards: placed(f"results/logs/ranks/{wildcards.run}"),
        # Snakemake does not compare parameters that depend on inputs: through this one it sees an edited option.
        compared=lambda wildcards: CONFIG.run_options(RUNS[wildcards.run]),
        options=lambda wildcards, input: [found(word, input.data) for word in CONFIG.run_options(RUNS[wildcards.run])],
        nodes=nodes_options(cluster_of_run),
        replan=replan_options,
        outliving=outliving_options,
        steps=lambda wildcards: settings_of_run(wildcards).steps,
    message:
        "train {wildcards.run}: {params.steps} steps"
    shell:
        "resume.sh 10 {params.folder:q}/STOPPED.json"
        " on_nodes.sh {resources.node_groups:q} {params.outliving:q}"
        " shardwright train run {input.plan:q}"
        " --data {params.data:q} --checkpoints {params.checkpoints:q} --log-dir {params.logs:q} {params.options:q}"
        " {params.nodes:q} {params.replan:q} --out {params.folder:q} 2> {log:q}"


rule convert:
    input:
        plan=lambda wildcards: f"results/plans/{settings_of_run(wildcards).search}.json",
        done="results/runs/{run}/DONE.json",
    output:
        model=directory("results/runs/{run}/model"),
    log:
        "results/logs/convert/{run}.log",
    benchmark:
        "results/benchmarks/convert/{run}.tsv"
    conda:
        "../envs/train.yaml"
    resources:
        mem_mb=16000,
        runtime=240,
    params:
        options=lambda wildcards: [placed(word) for word in CONFIG.convert_options(RUNS[wildcards.run])],
    message:
        "write the model of {wildcards.run} as a folder that transformers opens"
    shell:
        "shardwright train convert {input.done:q} --plan {input.plan:q} {params.options:q}"
        " --out {output.model:q} 2> {log:q}"


rule validate:
    input:
        plan="results/plans/{search}.json",
        prediction="results/plans/{search}.prediction.json",
    output:
        measurement="results/measurements/plans/{search}.json",
    log:
        "results/logs/validate/{search}.log",
    benchmark:
        "results/benchmarks/validate/{search}.tsv"
    conda:
        "../envs/train.yaml"
    threads: all_cores
    resources:
        **on_cluster(cluster_of_search, runtime_min=60),
    params:
        nodes=nodes_options(cluster_of_search),
        steps=CONFIG.settings.validate.steps,
        warmup_steps=CONFIG.settings.validate.warmup_steps,
    message:
        "measure the plan {wildcards.search} and its runners-up"
    shell:
        "on_nodes.sh {resources.node_groups:q}"
        " shardwright train measure {input.plan:q} {input.prediction:q} {params.nodes:q}"
        " --steps {params.steps:q} --warmup-steps {params.warmup_steps:q} --out {output.measurement:q} 2> {log:q}"


# The correction is a separate file: profiles stay as they were measured, and a search uses it only if it names it.
rule correct:
    input:
        measurement="results/measurements/plans/{search}.json",
        hardware=lambda wildcards: f"results/hardware/{cluster_of_search(wildcards)}.h5",
        profiles=profiles_of_search,
    output:
        correction="results/corrections/{search}.json",
    log:
        "results/logs/correct/{search}.log",
    benchmark:
        "results/benchmarks/correct/{search}.tsv"
    conda:
        "../envs/plan.yaml"
    resources:
        **LIGHT,
    params:
        profiles=lambda wildcards, input: spelled_options({"profile": list(input.profiles)}),
    message:
        "learn a correction from the measured plans of {wildcards.search}"
    shell:
        "shardwright correct {input.measurement:q} --hardware {input.hardware:q} {params.profiles:q}"
        " --out {output.correction:q} > {log:q} 2>&1"
