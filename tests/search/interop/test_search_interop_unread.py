"""What a file of another system sets that a plan cannot express is refused by its name, and nothing else is."""

import json
from functools import cache

import pytest

from shardwright.io import BadInput
from shardwright.types import Schedule
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.options import AdviseOptions

ARGUMENTS = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 1"
TOML = {
    "parallelism": {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2},
    "training": {"local_batch_size": 8},
}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
LAYERS = ",".join("1" * 32)
GALVATRON = {
    "pp_deg": 1, "tp_sizes_enc": LAYERS, "tp_consecutive_flags": LAYERS, "dp_types_enc": LAYERS, "global_bsz": 64,
    "chunks": 2, "pipeline_type": "gpipe", "default_dp_type": "ddp",
}  # fmt: skip
RECIPE = """def config() -> ConfigContainer:
    cfg.model = AutoBridge.from_hf_pretrained("llama").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.train.micro_batch_size = 1
    {}
"""
SETUP = """MICRO_BATCH_SIZE = 1
ACCELERATOR = Accelerator(
    parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=16{mesh}),
    fsdp_plugin=FullyShardedDataParallelPlugin(
        reshard_after_forward=True, activation_checkpointing=False{plugin}
    ),
    gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True{steps}),{more}
)
"""


@cache
def _setting(precision: str = "bfloat16"):
    gpus = "2x8:B200" if precision == "nvfp4" else "2x8:H100-SXM"
    return question_of(AdviseOptions(model="llama-2-7b", gpus=gpus, batch=64, precision=precision)).setting


def _toml(changes):
    sections = {**TOML}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        sections[section] = {**sections.get(section, {}), name: value}
    return "".join(
        f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items())
        for section, keys in sections.items()
    )


def _deepspeed(changes):
    keys = json.loads(json.dumps(DEEPSPEED))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (keys.setdefault(section, {}) if section else keys)[name] = value
    return json.dumps(keys)


def _setup(**places):
    given = {place: "".join(f", {argument}" for argument in arguments) for place, arguments in places.items()}
    more = given.pop("more", "").removeprefix(", ")
    return SETUP.format(**{"mesh": "", "plugin": "", "steps": "", "more": f" {more},"[: 9999 * bool(more)]} | given)


REFUSED = {
    "megatron": (
        "args.txt",
        lambda words: f"{ARGUMENTS} {words}",
        (
            ("--optimizer-cpu-offload", "optimizer_cpu_offload"),
            ("--cpu-offloading-num-layers 4", "cpu_offloading_num_layers 4"),
            ("--fine-grained-activation-offloading", "fine_grained_activation_offloading"),
            ("--use-precision-aware-optimizer", "use_precision_aware_optimizer"),
            ("--exp-avg-dtype fp8", "exp_avg_dtype fp8"),
            ("--fp8-param-gather", "fp8_param_gather"),
            ("--fp8-format hybrid", "fp8_format hybrid"),
            ("--optimizer sgd", "optimizer sgd"),
            ("--cuda-graph-impl local", "cuda_graph_impl local"),
            ("--use-torch-fsdp2", "use_torch_fsdp2"),
            ("--enable-full-sharding-in-hsdp", "enable_full_sharding_in_hsdp"),
            ("--outer-dp-sharding-strategy optim", "outer_dp_sharding_strategy optim"),
            ("--use-tp-pp-dp-mapping", "use_tp_pp_dp_mapping"),
            ("--distribute-saved-activations", "distribute_saved_activations"),
            ("--moe-expert-capacity-factor 1.0", "moe_expert_capacity_factor 1.0"),
            ("--recompute-granularity full --recompute-num-layers 4", "recompute_num_layers 4 of method uniform"),
            ("--made-up-parallel-size 2", "made_up_parallel_size 2"),
        ),
    ),
    "torchtitan": (
        "run.toml",
        _toml,
        (
            (("training.enable_cpu_offload", True), "training.enable_cpu_offload True"),
            (("training.dtype", "bfloat16"), "training.dtype bfloat16"),
            (("training.made_up", 1), "training.made_up 1"),
            (("parallelism.made_up", "x"), "parallelism.made_up x"),
            (("parallelism.disable_loss_parallel", True), "parallelism.disable_loss_parallel True"),
            (("parallelism.pipeline_parallel_layers_per_stage", 2), "parallelism.pipeline_parallel_layers_per_stage 2"),
            (("parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"), "pipeline_parallel_schedule ZBVZeroBubble"),
            (
                ("parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
                "pipeline_parallel_schedule Interleaved1F1B",
            ),
            (("activation_checkpoint.made_up", True), "activation_checkpoint.made_up True"),
            (("optimizer.early_step_in_backward", True), "optimizer.early_step_in_backward True"),
            (("optimizer.name", "Muon"), "optimizer.name Muon"),
            (("model.converters", ["float8"]), "model.converters float8"),
            (("float8.enable_fsdp_float8_all_gather", True), "float8.enable_fsdp_float8_all_gather True"),
            (("quantize.linear.float8.enable_fsdp_float8_all_gather", True), "enable_fsdp_float8_all_gather True"),
            (("fault_tolerance.enable", True), "fault_tolerance.enable True"),
            (("mine.activation_offload", True), "mine.activation_offload True"),
        ),
    ),
    "deepspeed": (
        "ds.json",
        _deepspeed,
        (
            (("zero_optimization.offload_optimizer", {"device": "cpu"}), "zero_optimization.offload_optimizer"),
            (("zero_optimization.offload_param", {"device": "nvme"}), "zero_optimization.offload_param"),
            (("zero_optimization.cpu_offload", True), "zero_optimization.cpu_offload True"),
            (("zero_optimization.zero_hpz_partition_size", 8), "zero_optimization.zero_hpz_partition_size 8"),
            (("zero_optimization.zero_quantized_weights", True), "zero_optimization.zero_quantized_weights True"),
            (("zero_optimization.reduce_scatter", False), "zero_optimization.reduce_scatter False"),
            (("zero_optimization.mics_shard_size", 8), "zero_optimization.mics_shard_size 8"),
            (("zero_optimization.made_up", 1), "zero_optimization.made_up 1"),
            (("activation_checkpointing.cpu_checkpointing", True), "activation_checkpointing.cpu_checkpointing True"),
            (("optimizer.type", "OneBitAdam"), "optimizer.type OneBitAdam"),
            (("bf16.bf16_master_weights_and_grads", True), "bf16.bf16_master_weights_and_grads True"),
            (("progressive_layer_drop", {"enabled": True}), "progressive_layer_drop"),
            (("sequence_parallel_size", 4), "sequence_parallel_size 4"),
            (("activation_offload", True), "activation_offload True"),
        ),
    ),
    "galvatron": (
        "galvatron.json",
        lambda changes: json.dumps(GALVATRON | changes),
        (
            (("cpu_offload", 1), "unknown field `cpu_offload`"),
            (("made_up", 0), "unknown field `made_up`"),
        ),
    ),
    "megatron-bridge": (
        "recipe.py",
        RECIPE.format,
        (
            ("cfg.model.cpu_offloading = True", "cfg.model.cpu_offloading True"),
            ("cfg.model.cpu_offloading = not False", "cfg.model.cpu_offloading not False"),
            (
                "cfg.model.fine_grained_activation_offloading = True",
                "cfg.model.fine_grained_activation_offloading True",
            ),
            ("cfg.model.fp8 = 'hybrid'", "cfg.model.fp8 hybrid"),
            ("cfg.model.cuda_graph_impl = 'local'", "cfg.model.cuda_graph_impl local"),
            ("cfg.optimizer.optimizer_cpu_offload = True", "cfg.optimizer.optimizer_cpu_offload True"),
            ("cfg.optimizer.exp_avg_dtype = 'uint8'", "cfg.optimizer.exp_avg_dtype uint8"),
            ("cfg.optimizer.made_up = 1", "cfg.optimizer.made_up 1"),
            ("cfg.ddp.fp8_param_gather = True", "cfg.ddp.fp8_param_gather True"),
            ("cfg.ddp.made_up = 1", "cfg.ddp.made_up 1"),
            ("cfg.mixed_precision = 'bf16_with_fp8_delayed_scaling_mixed'", "cfg.mixed_precision bf16_with_fp8"),
            ("cfg.peft = LoRA(dim=8)", "cfg.peft LoRA(dim=8)"),
        ),
    ),
    "accelerate": (
        "setup.py",
        lambda given: _setup(**given),
        (
            (("plugin", "cpu_offload=True"), "FullyShardedDataParallelPlugin.cpu_offload True"),
            (
                ("plugin", "cpu_offload=CPUOffload(offload_params=True)"),
                "FullyShardedDataParallelPlugin.cpu_offload CPU",
            ),
            (("plugin", "activation_checkpointing_offload=True"), "activation_checkpointing_offload True"),
            (("plugin", "auto_wrap_policy='no_wrap'"), "FullyShardedDataParallelPlugin.auto_wrap_policy no_wrap"),
            (("plugin", "made_up=1"), "FullyShardedDataParallelPlugin.made_up 1"),
            (("plugin", "**more"), "FullyShardedDataParallelPlugin has arguments without names"),
            (("mesh", "tp_size=2"), "ParallelismConfig.tp_size 2"),
            (("mesh", "sp_size=2"), "ParallelismConfig.sp_size 2"),
            (("steps", "made_up=1"), "GradientAccumulationPlugin.made_up 1"),
            (("more", "kwargs_handlers=[AORecipeKwargs()]"), "Accelerator.kwargs_handlers [AORecipeKwargs()]"),
            (("more", "deepspeed_plugin=PLUGIN"), "Accelerator.deepspeed_plugin PLUGIN"),
        ),
    ),
}


def _cases():
    for system, (name, write, settings) in REFUSED.items():
        for given, words in settings:
            changes = given if isinstance(given, str) else dict([given])
            if system == "accelerate":
                changes = {given[0]: [given[1]]}
            yield pytest.param(name, write(changes), words, id=f"{system}: {words}")


@pytest.mark.parametrize(("name", "text", "words"), list(_cases()))
def test_a_setting_that_a_plan_cannot_express_is_refused_by_its_name(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput) as refused:
        reading_of(str(tmp_path / name), _setting())
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / name}: ") and words in line and "\n" not in line


OFFLOADS_NOTHING = {"offload_optimizer": {"device": "none"}, "offload_param": None, "cpu_offload": False}
ACCEPTED = {
    "args.txt": f"""{ARGUMENTS} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --bf16
        --overlap-param-gather --tp-comm-overlap --num-layers 32 --hidden-size 4096 --swiglu --lr 1e-4
        --weight-decay 0.1 --min-lr 1e-5 --adam-beta2 0.95 --clip-grad 1.0 --train-iters 100 --data-path
        /data/text --split 99,1,0 --seed 7 --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama --save
        /ckpt --save-interval 10 --ckpt-format torch_dist --no-save-optim --log-interval 1 --tensorboard-dir
        /logs --eval-iters 0 --use-flash-attn --optimizer adam --transformer-impl transformer_engine
        --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --no-masked-softmax-fusion
        --cross-entropy-loss-fusion --distributed-timeout-minutes 60 --manual-gc --main-grads-dtype fp32
        --cpu-offloading-num-layers 0 --my-own-text-of-a-fork 3""",
    "run.toml": _toml(
        {
            "job.dump_folder": "out", "metrics.enable_wandb": True, "model.name": "llama3", "model.flavor": "8B",
            "model.converters": [], "optimizer.name": "AdamW", "optimizer.lr": 3e-4, "lr_scheduler.warmup_steps": 9,
            "training.dataset": "c4", "training.steps": 9, "training.enable_cpu_offload": False, "training.seed": 3,
            "parallelism.enable_async_tensor_parallel": True, "parallelism.pipeline_parallel_schedule": "1F1B",
            "parallelism.pipeline_parallel_schedule_csv": "", "activation_checkpoint.mode": "full",
            "activation_checkpoint.early_stop": False, "compile.enable": True, "checkpoint.async_mode": "async",
            "float8.recipe_name": "rowwise", "fault_tolerance.enable": False, "mine.colour": "red",
        }
    ),
    "ds.json": _deepspeed(
        {
            **{f"zero_optimization.{name}": value for name, value in OFFLOADS_NOTHING.items()},
            "zero_optimization.overlap_comm": True, "zero_optimization.stage3_prefetch_bucket_size": "auto",
            "zero_optimization.reduce_scatter": True, "bf16.enabled": "auto", "fp16.enabled": False,
            "fp16.loss_scale": 0, "optimizer.type": "AdamW", "optimizer.params": {"lr": "auto"}, "steps_per_print": 10,
            "scheduler.type": "WarmupLR", "gradient_clipping": "auto", "wandb": {"enabled": True}, "note": "mine",
            "activation_checkpointing.cpu_checkpointing": False, "elasticity": {"enabled": False},
        }
    ),
    "recipe.py": RECIPE.format(
        "cfg.model.num_layers = 32\n    cfg.model.cpu_offloading = False\n    cfg.model.cuda_graph_impl = 'none'\n"
        "    cfg.ddp.overlap_grad_reduce = True\n    cfg.ddp.grad_reduce_in_fp32 = True\n    cfg.optimizer.lr = 1e-4\n"
        "    cfg.mixed_precision = 'bf16_mixed'\n    cfg.logger.log_interval = 1\n    cfg.dataset.num_workers = 2\n"
        "    cfg.checkpoint.save = '/ckpt'\n    cfg.train.train_iters = 9\n    cfg.peft = None\n    cfg.rng.seed = 5\n"
        "    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)\n    cfg.scheduler.lr_warmup_iters = 3"
    ),
    "setup.py": _setup(
        plugin=["fsdp_version=2", "cpu_offload=False", "backward_prefetch='BACKWARD_PRE'", "ignored_modules=None"],
        mesh=["tp_size=1"],
        steps=["num_steps=4"],
        more=["mixed_precision='bf16'", "log_with='wandb'", "kwargs_handlers=None"],
    ) + "LOADER = DataLoader(words, pin_memory=True)\n",
}  # fmt: skip
"""Settings of data, logging, model, learning rate and checkpoints, and others at their defaults."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_settings_of_data_logging_and_model_are_taken_and_those_at_their_defaults(tmp_path, name):
    (tmp_path / name).write_text(ACCEPTED[name])
    assert reading_of(str(tmp_path / name), _setting()).plan.world_size == 16


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", f"parallelism.{'a.' * 2_000}offload = 1\nparallelism.tensor_parallel_degree = 1\n"),
        ("run.toml", f"{'a.' * 2_000}offload = 1\nparallelism.tensor_parallel_degree = 1\n"),
        ("run.toml", f"parallelism.tensor_parallel_degree = 1\nparallelism.x = 0x{'f' * 9_000}\n"),
        ("run.toml", _toml({"parallelism.x": "a\nb\u001b"})),
        ("ds.json", _deepspeed({"zero_optimization.a\nb\u001b": 1})),
        ("recipe.py", RECIPE.format(f"cfg.ddp.x = 0x{'f' * 9_000}")),
        ("setup.py", _setup(plugin=[f"x={'1+' * 300}1"])),
        ("setup.py", _setup(plugin=[f"x={'(' * 9_000}"])),
    ],
    ids=lambda text: text[:12],
)
def test_odd_values_of_settings_are_refused_in_one_line(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput) as refused:
        reading_of(str(tmp_path / name), _setting())
    line = str(refused.value)
    assert line.isprintable() and len(line) < 400


def test_products_in_fp8_are_taken_where_the_question_asks_for_them(tmp_path):
    taken = {
        "args.txt": f"{ARGUMENTS} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather",
        "run.toml": _toml({"model.converters": ["float8"], "float8.recipe_name": "tensorwise"}),
        "recipe.py": RECIPE.format("cfg.mixed_precision = 'bf16_with_fp8_delayed_scaling_mixed'"),
    }
    for name, text in taken.items():
        (tmp_path / name).write_text(text)
        assert reading_of(str(tmp_path / name), _setting("fp8")).plan.precision.compute == "fp8"
        with pytest.raises(BadInput, match="is not priced"):
            reading_of(str(tmp_path / name), _setting())


def test_products_in_nvfp4_are_taken_where_the_question_asks_for_them(tmp_path):
    taken = {
        "args.txt": f"{ARGUMENTS} --fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
        "recipe.py": RECIPE.format("cfg.mixed_precision = 'bf16_with_nvfp4_mixed'"),
    }
    for name, text in taken.items():
        (tmp_path / name).write_text(text)
        assert reading_of(str(tmp_path / name), _setting("nvfp4")).plan.precision.compute == "nvfp4"
        for other in ("bfloat16", "fp8"):
            with pytest.raises(BadInput, match="is not priced"):
                reading_of(str(tmp_path / name), _setting(other))


def test_a_pipeline_of_torchtitan_runs_the_schedule_that_it_names(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(_toml({"parallelism.pipeline_parallel_schedule": "GPipe"}))
    assert reading_of(str(run), _setting()).plan.schedule is Schedule.GPIPE
    run.write_text(_toml({}))
    assert reading_of(str(run), _setting()).plan.schedule is Schedule.ONE_F_ONE_B
