"""Choices of a user, read from three languages, and rules of thumb, each as a plan."""

import json
import tracemalloc
from functools import cache

import pytest
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import Attention, DataParallel, GradientReduction, Recompute, Schedule, SequenceParallel
from shardwright_search.advise.choices import RULES, plan_of_rule, reading_of
from shardwright_search.advise.question import question_of
from shardwright_search.advise.ways_out import ways_to_fit
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions


def _question(model="llama-2-7b", gpus="2x8:H100-SXM", batch=64, **more):
    return question_of(AdviseOptions(model=model, gpus=gpus, batch=batch, **more))


@cache
def _setting():
    return _question().setting


MEGATRON = """--tensor-model-parallel-size 4 --pipeline-model-parallel-size=2 # of the run
--sequence-parallel --micro-batch-size 2 --use-distributed-optimizer --recompute-granularity selective
--recompute-modules mlp --num-layers 32 --lr 3e-4"""
TORCHTITAN = """[parallelism]
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "full"
"""


def _wanted(setting, recompute=Recompute.MLP, chunks=1):
    states, split = DataParallel.ZERO2, SequenceParallel.MEGATRON
    choice = setting.uniform(
        "mine", 2, 2, tp_size=4, data_parallel=states, sequence_parallel=split, recompute=recompute
    )
    return setting.plan(choice._replace(chunks=chunks), "mine")


def _read(text, setting):
    """The plan that a text stands for, called `mine`."""
    return replace(reading_of(str(text), setting).plan, name="mine")


def test_one_choice_is_read_alike_in_three_languages(tmp_path):
    (tmp_path / "args.txt").write_text(MEGATRON)
    (tmp_path / "run.toml").write_text(TORCHTITAN)
    setting = _question().setting
    wanted = _wanted(setting)
    assert _read("tp=4,pp=2,mbs=2,zero=1,recompute=mlp", setting) == wanted
    assert _read(" ".join(MEGATRON.replace("# of the run", "").split()), setting) == wanted
    assert _read(tmp_path / "args.txt", setting) == wanted
    full = _wanted(setting, Recompute.FULL)
    assert _read(tmp_path / "run.toml", setting) == full


def test_what_torchtitan_leaves_out_means_what_it_means_there(tmp_path):
    """FSDP2 over all ranks, resharding, every second layer recomputed, each microbatch's gradients reduced."""
    run, setting = tmp_path / "run.toml", _question().setting
    run.write_text("[parallelism]\ntensor_parallel_degree = 1\n[training]\nlocal_batch_size = 4\n")
    plan = _read(run, setting)
    assert (plan.microbatch_samples, plan.gradient_reduction) == (64, GradientReduction.EVERY_MICROBATCH)
    assert {layer.data_parallel for layer in plan.layers} == {DataParallel.ZERO3}
    assert [layer.recompute for layer in plan.layers[:4]] == [Recompute.NONE, Recompute.FULL] * 2
    run.write_text("[parallelism]\ndata_parallel_replicate_degree = 2\n")
    assert _read(run, setting).layers[0].shard_size == 8
    run.write_text("[parallelism]\ndata_parallel_replicate_degree = 16\n")
    assert _read(run, setting).layers[0].data_parallel is DataParallel.DDP
    by_operator = '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n'
    run.write_text(f"parallelism.tensor_parallel_degree = 1\n{by_operator}")
    reading = reading_of(str(run), setting)
    assert {layer.recompute for layer in reading.plan.layers} == {Recompute.SELECTIVE}
    assert "it keeps every second one" in reading.notes[0]


@pytest.mark.parametrize(
    ("words", "kind", "notes"),
    [
        ("--recompute-granularity selective", Recompute.NONE, ["core_attn"]),
        ("--recompute-activations", Recompute.NONE, ["core_attn"]),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", Recompute.MLP, ["core_attn"]),
        ("--recompute-granularity selective --recompute-modules layernorm", Recompute.LIGHT, []),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm", Recompute.LIGHT, ["core_attn"]),
        ("--recompute-granularity selective --recompute-modules mlp", Recompute.MLP, []),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", Recompute.FULL, []),
        ("", Recompute.NONE, []),
    ],
)
def test_megatron_recomputes_the_modules_that_it_lists_and_core_attention_alone_by_default(words, kind, notes):
    reading = reading_of(f"--micro-batch-size 1 {words}", _question().setting)
    assert {layer.recompute for layer in reading.plan.layers} == {kind}
    assert len(reading.notes) == len(notes) and all(a in b for a, b in zip(notes, reading.notes, strict=True))


def test_modules_that_no_plan_recomputes_and_eager_core_attention_are_refused():
    setting = _question().setting
    for words, named in (
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "recompute_modules mla_up_proj is not"),
        (
            "--recompute-granularity selective --recompute-modules mlp moe",
            "recompute_modules moe is not priced by itself",
        ),
        ("--recompute-granularity half", "recompute_granularity 'half': choose full, selective"),
    ):
        with pytest.raises(BadInput, match=named):
            reading_of(words, setting)
    with pytest.raises(BadInput, match="core_attn with eager attention is not priced"):
        reading_of("--recompute-activations", setting._replace(attention=Attention.EAGER))


@pytest.mark.parametrize(
    ("words", "chunks", "sizes"),
    [
        ("--pipeline-model-parallel-layout Et*7|t*9|(tt|)*2t*12L", 1, None),
        ("--pipeline-model-parallel-layout Et*7|t*9|t*9|t*7L", 1, [7, 9, 9, 7]),
        ("--pipeline-model-parallel-layout E|t*16|t*16|L", 1, [0, 16, 16, 0]),
        ("--pipeline-model-parallel-layout Ett|(ttttt|)*6L", 2, [2, 5, 5, 5, 5, 5, 5, 0]),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", 1, [7, 10, 10, 5]),
        ("--decoder-first-pipeline-num-layers 5", 1, [5, 9, 9, 9]),
        ("--num-layers-per-virtual-pipeline-stage 2", 4, [2] * 16),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, [4] * 8),
    ],
)
def test_megatron_s_layouts_are_read(words, chunks, sizes):
    words = f"--pipeline-model-parallel-size 4 --micro-batch-size 1 {words}"
    if sizes is None:
        with pytest.raises(BadInput, match="5 ranges of 32 layers for 4 pipeline stages"):
            reading_of(words, _question().setting)
        return
    plan = reading_of(words, _question().setting).plan
    assert len(plan.stages[0].layers) == chunks
    ranges = [stage.layers[chunk] for chunk in range(chunks) for stage in plan.stages]
    assert [high - low for low, high in ranges] == sizes


def test_a_choice_is_the_plan_that_it_says():
    plan = _wanted(_question().setting, chunks=2)
    assert (len(plan.stages), plan.num_microbatches, plan.microbatch_samples) == (2, 16, 4)
    assert plan.schedule is Schedule.INTERLEAVED_1F1B and len(plan.stages[0].layers) == 2
    layer = plan.layers[0]
    assert (layer.tp_size, layer.dp_size, layer.sequence_parallel) == (4, 2, SequenceParallel.MEGATRON)
    assert (layer.data_parallel, layer.recompute) == (DataParallel.ZERO2, Recompute.MLP)


def test_zero3_holds_a_shard_of_the_gradients_between_microbatches():
    """Of 6.74e9 parameters in float32 a sixteenth, and the embedding's own gradient until it is reduced.

    A rank that kept all gradients would hold 25.1 GiB.
    """
    question = _question()
    plan = reading_of("zero=3,mbs=1,recompute=full", question.setting).plan
    assert plan.num_microbatches == 4
    (stage,) = evaluate(plan, question.profiles).estimate.stages
    assert stage.memory_terms_bytes["gradients"] == pytest.approx(4 * (6.738e9 / 16 + 32000 * 4096), rel=1e-3)


def test_each_kind_of_recomputation_that_is_documented_is_priced():
    """Kinds that the search does not choose from were missing in the estimated profile, so that they were refused."""
    asked = {kind: f"tp=8,mbs=1,recompute={kind}" for kind in Recompute}
    question, held = _question(against=tuple(asked.values())), {}
    for kind, choice in asked.items():
        plan = reading_of(choice, question.setting).plan
        held[kind] = evaluate(plan, question.profiles).estimate.memory_bytes
    assert held[Recompute.FULL] < held[Recompute.SELECTIVE] < held[Recompute.NONE]
    assert max(held[Recompute.MLP], held[Recompute.ATTENTION], held[Recompute.LIGHT]) < held[Recompute.NONE]
    halves = [kind for kind in Recompute if kind.half not in (None, kind)]
    # The model has no latents.
    assert [kind for kind in halves if held[kind] >= held[kind.half]] == [Recompute.MLP_LATENTS]


@pytest.mark.parametrize(
    ("name", "model", "gpus", "sizes"),
    [
        ("tp8", "llama-2-7b", "2x8:H100-SXM", (8, 1)),
        # 8.8e9 parameters a rank of 6 bytes and 12 over dp 8, and 80 layers' activations are 94 GiB; two stages are
        # 69.8 GiB, within the 92 % that are used.
        ("tp8", "llama-3-70b", "8x8:H100-SXM", (8, 2)),
        ("nvidia-table", "llama-2-7b", "2x8:H100-SXM", (4, 1)),
        ("nvidia-table", "llama-3-70b", "8x8:H100-SXM", (8, 4)),
        ("smallest", "gpt2-xl", "8:A100-80", (1, 1)),
    ],
)
def test_rules_of_thumb_say_what_their_source_says(name, model, gpus, sizes):
    question = _question(model, gpus)

    def fits(plan):
        return question.fits(plan, evaluate(plan, question.profiles, timeline=False).estimate)

    plan = plan_of_rule(name, question, fits)
    assert (plan.layers[0].tp_size, len(plan.stages)) == sizes
    assert "arXiv" in RULES[name].source


def test_the_table_s_micro_batch_is_halved_until_it_divides_the_batch():
    """Llama 2 7B is below 7.5 B: tp 4 on 16 GPUs leaves dp 4 and, of a batch of 24, 6 samples of the table's 16."""
    question = _question(batch=24)
    plan = plan_of_rule("nvidia-table", question, lambda _: True)
    assert (plan.layers[0].tp_size, plan.layers[0].dp_size, plan.microbatch_samples) == (4, 4, 4 * 2)


DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
GALVATRON = {
    "pp_deg": 1, "tp_sizes_enc": "1,1,1,1", "tp_consecutive_flags": "1,1,1,1", "dp_types_enc": "0,0,0,0",
    "global_bsz": 32, "chunks": 2, "pipeline_type": "gpipe", "default_dp_type": "ddp",
}  # fmt: skip
RECIPE = """ConfigContainer
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.micro_batch_size = 1
"""
SETUP = """MICRO_BATCH_SIZE = 1
ACCELERATOR = Accelerator(
    parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=8),
    fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=True, activation_checkpointing=False),
    gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True),
)
"""
NOTHING = {
    "empty.txt": (b"", "sets no parallel size"),
    "noise.txt": (bytes(range(1, 256)), "is not text in UTF-8"),
    "letters.txt": (b"hello --world 8 and others", "sets no parallel size"),
    "wide.txt": ("--tensor-model-parallel-size 8".encode("utf-16"), "is not text in UTF-8"),
    "zeros.txt": (bytes(100), "holds control characters"),
    "run.yaml": (b"trainer:\n  devices: 8\nmodel:\n  tensor_model_parallel_size: 8\n", "sets no parallel size"),
    "batch.txt": (b"--micro-batch-size 2 --lr 1e-3", "sets no parallel size"),
    "run.sh": (b"torchrun --nnodes 2 pretrain_gpt.py --bf16", "sets no parallel size"),
    "empty.toml": (b"", "sets no parallel size"),
    "batch.toml": (b"[training]\nlocal_batch_size = 4\n", "sets no parallel size"),
    "list.toml": (b"parallelism = [1]\n", "parallelism is not a table"),
    "parts.toml": (
        b"[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = 3\n",
        "not a list of lists",
    ),
    "wide.toml": ("[parallelism]\ntensor_parallel_degree = 8\n".encode("utf-16"), "is not text in UTF-8"),
    "empty.json": (b"{}", "is not a file of DeepSpeed, Galvatron"),
    "wide.json": (json.dumps(DEEPSPEED).encode("utf-16"), "is not text in UTF-8"),
    "unsharded.json": (b'{"train_micro_batch_size_per_gpu": 1}', "is not a configuration of DeepSpeed"),
    "half.json": (b'{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2.0}}', "stage 2.0"),
    "twice.json": (
        b'{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "stage": 3}}',
        "appears twice",
    ),
    "empty.py": (b"", "is not a file of accelerate, Megatron Bridge"),
    "none.py": (SETUP.replace("SIZE = 1", "SIZE = 0").encode(), "sets no MICRO_BATCH_SIZE"),
    "recipe.py": (b"ConfigContainer\n    cfg.train.micro_batch_size = 1\n", "sets no parallel size"),
    "long.py": (RECIPE.replace("= 2", f"= 0x{'f' * 9000}").encode(), "is neither a text nor a number"),
    "deep.py": (RECIPE.replace("= 2", f"= {'(' * 500_000}").encode(), "sets no parallel size"),
    "deep.json": (b'{"pp_deg": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep.toml": (b"[parallelism]\nx = " + b"[" * 100_000 + b"]" * 100_000, "is not TOML"),
    "digits.toml": (b"[parallelism]\ntensor_parallel_degree = " + b"9" * 9_000, "is not TOML"),
}
"""Files that set no parallel size, or are no text of another system."""


@pytest.mark.parametrize("name", NOTHING)
def test_a_file_that_sets_no_parallel_size_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(NOTHING[name][0])
    with pytest.raises(BadInput) as refused:
        reading_of(str(tmp_path / name), _setting())
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / name}: ") and NOTHING[name][1] in line and line.count(": ") >= 2


@pytest.mark.parametrize("size", ["9999999999", "9" * 5000, "400001"])
@pytest.mark.parametrize("layout", ["Et*{}|L", "E(t|)*{}L", "E(t*300000|)*{}L", "Et|()*{}L"])
def test_a_layout_is_written_out_only_as_far_as_models_have_layers(layout, size):
    words = f"--tensor-model-parallel-size 1 --pipeline-model-parallel-layout {layout.format(size)}"
    tracemalloc.start()
    with pytest.raises(BadInput, match=r"is of more than 100000 layers|ranges of \d layers for"):
        reading_of(words, _setting())
    assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-size 1048576 --decoder-first-pipeline-num-layers 1",
        "--pipeline-model-parallel-size 9999999 --decoder-last-pipeline-num-layers 1",
        "--num-virtual-stages-per-pipeline-rank 9999999",
        "--num-layers-per-virtual-pipeline-stage 9999999",
        "--context-parallel-size 9999999",
        "--expert-model-parallel-size 9999999",
        "--num-distributed-optimizer-instances 9999999",
        "--micro-batch-size 9999999",
    ],
)
def test_sizes_beyond_all_measure_are_refused_at_once(words):
    with pytest.raises(BadInput):
        reading_of(words, _setting())


TOML = "[training]\nglobal_batch_size = {}\nseq_len = {}\n[parallelism]\ntensor_parallel_degree = 8\n"
TOML += "[activation_checkpoint]\nmode = 'none'\n"
BATCH, LENGTH = "is {}: it is priced with 64, as requested", "is {}: it is priced with 4096, as requested"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", "--tensor-model-parallel-size 8 --global-batch-size 512", [BATCH.format(512)]),
        ("a.txt", "--tensor-model-parallel-size 8 --global-batch-size 64 --seq-length 4096", []),
        ("a.txt", "\ufeff--tensor-model-parallel-size 8\r\n--seq-length 8192", [LENGTH.format(8192)]),
        ("a.toml", TOML.format(32, 512), [BATCH.format(32), LENGTH.format(512)]),
        ("a.toml", TOML.format(-1, 4096), []),
        ("a.json", json.dumps({**DEEPSPEED, "train_batch_size": 128}), [BATCH.format(128)]),
        (
            "a.py",
            f"{RECIPE}    cfg.train.global_batch_size = 8\n    cfg.dataset.seq_length = 2\n",
            [BATCH.format(8), LENGTH.format(2)],
        ),
        ("a.py", SETUP, []),
    ],
)
def test_another_batch_or_length_of_a_file_is_told(tmp_path, name, text, told):
    (tmp_path / name).write_text(text, newline="")
    notes = reading_of(str(tmp_path / name), _setting()).notes
    assert len(notes) == len(told) and all(words in note for words, note in zip(told, notes, strict=True))


def test_another_batch_of_galvatron_is_told_where_times_of_a_sample_are_compared(tmp_path):
    layers = ",".join("1" * 32)
    file = {**GALVATRON, "tp_sizes_enc": layers, "tp_consecutive_flags": layers, "dp_types_enc": layers}
    (tmp_path / "a.json").write_text(json.dumps(file))
    reading = reading_of(str(tmp_path / "a.json"), _setting())
    assert reading.plan.global_batch_size == 32
    assert reading.notes[0] == "its global_bsz is 32, 64 is asked: times of a sample are compared"
    (tmp_path / "a.json").write_text(json.dumps({**file, "pp_deg": 10**12}))
    with pytest.raises(BadInput, match="pp_deg"):
        reading_of(str(tmp_path / "a.json"), _setting())


def test_a_choice_that_does_not_fit_is_changed_until_it_does_and_the_time_is_that_of_the_changed_one():
    """One lever is enough in a mild case; in a hard one all are pulled, and nothing is claimed of what stays too large.

    The price in time is the changed plan's, as if it had been given itself.
    """
    for gib, choice, changed in (
        (40, "tp=4,mbs=8,zero=1", "tp=4,mbs=2,zero=1"),
        (20, "tp=2,mbs=8,zero=1", "tp=2,mbs=4,zero=3,recompute=full"),
    ):
        question = _question(gpus="1x8:A100-40", batch=64, budget_gib=gib)
        mine, leaner = (reading_of(text, question.setting).plan for text in (choice, changed))
        before, after = (evaluate(plan, question.profiles).estimate for plan in (mine, leaner))
        assert not question.fits(mine, before) and question.fits(leaner, after)
        ways = list(ways_to_fit(question, mine))
        ratio = after.simulated_step_time_s / before.simulated_step_time_s
        brings = f": fits, {after.simulated_step_time_s:.4g} s a step, {ratio:.2f} times its time"
        (fitting,) = (way for way in ways if way.endswith(brings))
        assert fitting.startswith("smaller micro-batches" if gib == 40 else "all of these"), ways
        assert any("still exceeds the budget by" in way for way in ways)
