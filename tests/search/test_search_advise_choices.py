"""Choices of a user, read from three languages, and rules of thumb, each as a plan."""

import pytest

from shardwright_formats.types import DataParallel, Recompute, Schedule, SequenceParallel
from shardwright_search.advise.choices import RULES, choice_of, plan_of_choice, plan_of_rule
from shardwright_search.advise.question import question_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions
from shardwright_search.space.uniform import UniformStrategy


def _question(model="llama-2-7b", gpus="2x8:H100-SXM", batch=64, **more):
    return question_of(AdviseOptions(model=model, gpus=gpus, batch=batch, **more))


MEGATRON = """--tensor-model-parallel-size 4 --pipeline-model-parallel-size=2 # of the run
--sequence-parallel --micro-batch-size 2 --use-distributed-optimizer --recompute-granularity selective
--num-layers 32 --lr 3e-4"""
TORCHTITAN = """[parallelism]
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "selective"
"""
WANTED = UniformStrategy(
    tp_size=4,
    pp_size=2,
    micro_batch_size=2,
    data_parallel=DataParallel.ZERO2,
    sequence_parallel=SequenceParallel.MEGATRON,
    recompute=Recompute.SELECTIVE,
)


def test_one_choice_is_read_alike_in_three_languages(tmp_path):
    (tmp_path / "args.txt").write_text(MEGATRON)
    (tmp_path / "run.toml").write_text(TORCHTITAN)
    question = _question()
    assert choice_of("tp=4,pp=2,mbs=2,zero=1,recompute=selective", question) == WANTED
    assert choice_of(" ".join(MEGATRON.replace("# of the run", "").split()), question) == WANTED
    assert choice_of(str(tmp_path / "args.txt"), question) == WANTED
    assert choice_of(str(tmp_path / "run.toml"), question) == WANTED


def test_what_torchtitan_leaves_out_means_what_it_means_there(tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nlocal_batch_size = 4\n")
    choice = choice_of(str(tmp_path / "run.toml"), _question())
    assert choice == UniformStrategy(
        micro_batch_size=4,
        data_parallel=DataParallel.ZERO3,
        sequence_parallel=SequenceParallel.MEGATRON,
        recompute=Recompute.SELECTIVE,
    )
    (tmp_path / "run.toml").write_text("[parallelism]\ndata_parallel_replicate_degree = 2\n")
    assert choice_of(str(tmp_path / "run.toml"), _question()).shard_size == 8
    (tmp_path / "run.toml").write_text("[parallelism]\ndata_parallel_replicate_degree = 16\n")
    assert choice_of(str(tmp_path / "run.toml"), _question()).data_parallel is DataParallel.DDP


def test_a_choice_is_the_plan_that_it_says():
    plan = plan_of_choice(WANTED._replace(chunks=2), "mine", _question())
    assert (len(plan.stages), plan.num_microbatches, plan.microbatch_samples) == (2, 16, 4)
    assert plan.schedule is Schedule.INTERLEAVED_1F1B and len(plan.stages[0].layers) == 2
    layer = plan.layers[0]
    assert (layer.tp_size, layer.dp_size, layer.sequence_parallel) == (4, 2, SequenceParallel.MEGATRON)
    assert (layer.data_parallel, layer.recompute) == (DataParallel.ZERO2, Recompute.SELECTIVE)


def test_zero3_holds_a_shard_of_the_gradients_between_microbatches():
    """Of 6.74e9 parameters in float32 a sixteenth, and the embedding's own gradient until it is reduced.

    A rank that kept all gradients would hold 25.1 GiB.
    """
    question = _question()
    plan = plan_of_choice(choice_of("zero=3,mbs=1,recompute=full", question), "fsdp", question)
    assert plan.num_microbatches == 4
    (stage,) = evaluate(plan, question.profiles).estimate.stages
    assert stage.memory_terms_bytes["gradients"] == pytest.approx(4 * (6.738e9 / 16 + 32000 * 4096), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "model", "gpus", "sizes"),
    [
        ("tp8", "llama-2-7b", "2x8:H100-SXM", (8, 1)),
        # 8.8e9 parameters a rank of 6 bytes and 12 over dp 8, and 80 layers' activations are 94 GiB; two stages are
        # 69.8 GiB, a little over the 86 % that are used, and four are 58.
        ("tp8", "llama-3-70b", "8x8:H100-SXM", (8, 4)),
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
