"""The options of the commands of `shardwright train`, defined once and passed to the ranks."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from shardwright.command import POSITIONAL, Off, Options
from shardwright.launch.heartbeat import HANG_TIMEOUT_S
from shardwright.launch.lock import HeldLock
from shardwright.launch.nodes import NodeOptions
from shardwright.types import Count, Gib, NonNegativeCount, Seconds, Share
from shardwright_train.data.corpora import Source
from shardwright_train.data.split import Boundaries, Fractions, LossOn
from shardwright_train.engine.learning_rate import LearningRateSchedule

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
_Rate = Annotated[float, Meta(ge=0, le=1e6)]
LogTo = Literal["tensorboard", "wandb", "none"]
"""Loggers to which the numbers of steps are sent, in addition to metrics.jsonl."""
Objective = Literal["span-corruption", "prefix"]
"""Objectives that T5 may be trained on."""
_Text = Annotated[str, Meta(min_length=1, max_length=1000)]


class DescribeOptions(Options, frozen=True, kw_only=True):
    """Describe a model for the planner: layer types, shapes, what must divide what. Builds no weights."""

    config_dir: Annotated[Path, POSITIONAL]
    """Folder with a Hugging Face config.json."""
    name: str
    """Name of the model in all later files."""
    out: Path
    """Model description to write (JSON)."""
    sequence_length: Count | None = None
    """Number of tokens of a sample; by default 4096, or the model's number of positions if that is smaller."""
    taken_as: str | None = field(default=None, name="as")
    """A family, such as llama or mixtral, whose model is described in place of one of an unknown type: it has the
    same width, layers, heads and experts, but is another model."""
    mtp: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of layers that predict further tokens, as in DeepSeek-V3, whose num_nextn_predict_layers is 1. By default
    none; a message says if config.json has some."""
    frozen: tuple[_Text, ...] = ()
    """Part that is not trained: embedding, head, layers, layers[2] or layers[0:8]; after a dot, only these parameters,
    as in layers.mlp.*. It has no gradients and no optimizer state. May be repeated."""
    lora: Path | None = None
    """peft's adapter_config.json, or its folder: only the low-rank matrices that it names are trained. If the folder
    has trained weights, a run begins with them (`run --adapter`)."""


class PrepareOptions(Options, frozen=True, kw_only=True):
    """Write the tokens of a text in Megatron's indexed format, by a tokenizer trained on it or by a model's own.

    Killed and started again, it resumes; the result is the same to the byte.
    """

    text: str
    """Text file, folder of text files, or `python-stdlib`: Python's own sources; --source lists other kinds."""
    out: Path
    """Folder for tokenizer.json, tokens.bin, tokens.idx, data.json; for images images.npy, labels.npy, classes.json."""
    source: Source = Source.AUTO
    """Format of the text: files of text or JSON lines, a folder of `datasets`, dumps of Wikipedia without their
    markup or with it (wikitext), or Megatron's .idx and .bin; auto: by the name. images: a folder with a subfolder of
    JPEG and PNG files for each class, for ViT and Swin."""
    image_size: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Height and width in pixels to which images are scaled and cropped: the model's image_size."""
    mel_bins: Annotated[int, Meta(ge=1, le=2**10)] | None = None
    """Number of frequencies of a spectrogram of speech: the model's num_mel_bins."""
    seconds: Annotated[int, Meta(ge=1, le=2**10)] = 30
    """Length in s to which every recording is padded: a fiftieth of the model's max_source_positions."""
    vocab_size: Annotated[int, Meta(ge=257, le=2**24)] | None = None
    """Number of tokens of the byte-level BPE to train; needed unless `tokenizer` is given."""
    tokenizer: Path | None = None
    """Folder of a model, with tokenizer.json and tokenizer_config.json: its tokenizer is used as it is, and its end of
    sequence, or else its separator, closes each document."""
    tokenizer_mib: Annotated[float, Meta(ge=0.01, le=2**20)] = 64.0
    """Largest amount of text, from the beginning, on which a tokenizer is trained, in MiB."""
    glob: str | None = None
    """Pattern of a folder's files; by default *.txt, or *.py for python-stdlib, *.jsonl* or *.xml.bz2 by --source."""
    field: str = "text"
    """Field of JSON lines and data sets that contains the document."""
    dataset_split: str = "train"
    """Split to use of a folder of `datasets` with several splits."""
    max_mib: Annotated[float, Meta(ge=0.01, le=2**20)] | None = None
    """Largest amount of text to use, in MiB; by default all."""
    workers: Count | None = None
    """Number of processes that tokenize; by default one per core."""
    loss_on: LossOn = LossOn.ALL
    """completions: JSON lines or rows have `prompt` and `completion`, `messages`, or `input_ids` and `labels`, and
    only the answers are learned (docs/data.md)."""


class RankOptions(NodeOptions, frozen=True, kw_only=True):
    """Options of commands that start ranks."""

    hang_timeout_s: Annotated[float, Meta(ge=1, le=1e9)] = HANG_TIMEOUT_S
    """Longest time of a step in s, including the first one with building and loading, and any save; after it all ranks'
    stacks are printed. Start-up has a separate limit of 600 s."""
    log_dir: Path | None = None
    """Folder for each rank's output, rank-<number>.log, to which every start appends. The last lines of a rank that
    fails are also printed at the end."""


class OnNodeLoss(StrEnum):
    """The reaction of a run to the loss of a node."""

    WAIT = "wait"
    """Restart, once the node is back."""
    REPLAN = "replan"
    """Search a plan for the remaining nodes, and continue under it."""


class RunOptions(RankOptions, frozen=True, kw_only=True, tag="run"):
    """Train; run the same command again to resume. Starts one process per device of this node itself.

    Exit codes: 0 done, 2 bad input or locked, 4 failed (NaN, dead rank, hang), 75 stopped in order (STOPPED.json in
    --out says where), 130 second signal.
    """

    plan: Annotated[Path, POSITIONAL]
    """Plan to train with (JSON)."""
    data: Path
    """Folder that `prepare` wrote, one with a blend.json, or one of images.npy and labels.npy; `random`: random
    samples, only for timing. See docs/data.md."""
    steps: Annotated[int, Meta(ge=1, lt=10**8)]
    """Total number of steps, including those before a run was resumed."""
    out: Path
    """Folder for metrics.jsonl and DONE.json."""
    checkpoints: Path
    """Folder for checkpoints, with a subfolder for each plan."""
    weights: Path | None = None
    """Folder of config.json and safetensors to begin with, instead of drawn weights; see docs/weights.md."""
    adapter: Path | None = None
    """Folder in peft's format with the trained low-rank matrices to begin with, in addition to --weights; see
    docs/training.md."""
    new_weights: bool = False
    """Draw parameters of the head, and of layers that predict further tokens, that --weights does not contain."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    checkpoint_minutes: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Minutes between checkpoints, if steps take longer than that; 0: only by steps."""
    checkpoint_async: Annotated[bool, Off("--checkpoint-sync")] = True
    """Copy what is saved to host memory and write it while the next steps run."""
    keep_checkpoints: Count = 2
    """Number of latest checkpoints to keep."""
    keep_every: NonNegativeCount = 0
    """Also keep the checkpoints of steps that are multiples of this number; 0: none."""
    resume_from: Path | None = None
    """Checkpoint (step-…) to branch from, of any plan for the same model: the branch has a separate folder, and resumes
    from it when it is run again. Without it a run resumes from its newest whole checkpoint."""
    allow_batch_change: bool = False
    """Let a branch have another global batch size than its checkpoint."""
    allow_length_change: bool = False
    """Let a branch have samples of another length, and other rotary settings, than its checkpoint; it continues after
    the same number of tokens."""
    max_time_s: Annotated[float, Meta(ge=1, le=1e9)] | None = None
    """Save and stop (exit 75) after the first step that ends this many seconds after the first began."""
    max_restarts: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Number of times to restart the ranks of all nodes when some were killed, hang, or are gone with their node."""
    on_node_loss: OnNodeLoss = OnNodeLoss.WAIT
    """Reaction to a lost node: wait for it (600 s), or search a plan for the other nodes with `shardwright plan`."""
    replan_hardware: Path | None = None
    """Hardware profile of the cluster (HDF5), for replan."""
    replan_profile: tuple[Path, ...] = ()
    """Model profile on a device of the cluster (HDF5), for replan."""
    replan_search: Path | None = None
    """Search file (JSON) with the plan's global batch size, for replan."""
    replan_imbalance: str | None = None
    """`--imbalance` of `shardwright plan`, for replan: a ratio of at least 1, or a load of experts (JSON)."""
    trial: bool = True
    """Try each pipeline stage by itself before the first step, so that too little memory is noticed, and kernels are
    loaded, before a stage waits for another; it takes part of a step's time."""
    grace_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds from a scheduler's stop signal to its kill; a warning says if a step and a save take longer."""
    learning_rate: _Rate = 3e-4
    """Peak learning rate, per step."""
    learning_rate_schedule: LearningRateSchedule | None = None
    """Schedule after the warm-up (cosine); wsd: constant, then a decay. A run that resumes with other --steps states it
    again if the rate changes with them."""
    warmup_steps: NonNegativeCount = 0
    """Steps of linear warm-up to the peak."""
    final_fraction: Share = 0.1
    """Final learning rate of cosine, linear and wsd, as a share of the peak."""
    decay_fraction: Share = 0.1
    """Length of the decay of wsd, as a share of all steps."""
    learning_rate_factor: tuple[_Text, ...] = ()
    """PATTERN=FACTOR: multiply the learning rate of parameters whose names match, as in `*.embed_tokens.weight=0.1`.
    May be repeated: the first match counts. The factor 0 leaves parameters unchanged."""
    weight_decay: _Rate = 0.1
    """Weight decay, which is multiplied by the learning rate: of matrices, not of norms and biases."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to norms and biases, too."""
    clip_norm: _Rate = 1.0
    """Largest global 2-norm of gradients; 0: no clipping."""
    router_bias_update_rate: _Rate = 1e-3
    """Change per step of the router biases with which DeepSeek-V3 chooses experts; 0 keeps them."""
    mtp_loss_scaling_factor: _Rate = 0.1
    """Factor of the mean loss of further predicted tokens in the loss of a model described with --mtp (Megatron-LM's
    option); DeepSeek-V3 was trained with 0.3, at the end with 0.1."""
    seed: NonNegativeCount = 0
    """Seed of initial weights and sample order."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs, which are slower; features without one are refused. Runs on CPU are always
    deterministic."""
    objective: Objective | None = None
    """Objective of T5: spans that are cut out of a text (default), or the continuation of a prefix."""
    loss_on: LossOn | None = None
    """Tokens over which the loss is a mean, in the whole global batch: all, or completions; by default completions if
    the data was prepared so."""
    valid_fraction: Share = 0.0
    """Share of the data, after the training data, that is held out for evaluation."""
    test_fraction: Share = 0.0
    """Share of the data, at its end, that no run sees."""
    reset_attention_mask: bool = False
    """Attend only within a document of a sample, and do not predict a token from another document (Megatron-LM's
    option)."""
    reset_position_ids: bool = False
    """Number positions from 0 in each document of a sample (Megatron-LM's option)."""
    valid_data: Path | None = None
    """Folder like `data` to evaluate on, instead of a share of it."""
    eval_every: NonNegativeCount = 0
    """Steps between evaluations; 0: only after the last step."""
    eval_samples: Count | None = None
    """Evaluate on this many samples from the beginning; by default on all."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest loss of all evaluations."""
    log_to: tuple[LogTo, ...] = ("none",)
    """Loggers of each step's loss, times (s), memory (GiB), and their predictions; may be given several times."""

    @property
    def schedule(self) -> LearningRateSchedule:
        """Return the schedule of the learning rate."""
        return self.learning_rate_schedule or LearningRateSchedule.COSINE

    @property
    def boundaries(self) -> Boundaries:
        """Return the treatment of document boundaries in a sample."""
        return Boundaries(self.reset_attention_mask, self.reset_position_ids)

    @property
    def fractions(self) -> Fractions:
        """Return the fractions into which the data is split."""
        return Fractions(self.valid_fraction, self.test_fraction)


class CheckOptions(Options, frozen=True, kw_only=True):
    """Check a plan in one process, without its cluster: messages (bytes) and tensor memory (MiB) of every role.

    Simulates a step of one rank of each distinct role on tensors without data. Exit codes: 0 it fits, 2 the plan is not
    valid or cannot be run, 3 a rank has too little memory (the line says how much).
    """

    plan: Annotated[Path, POSITIONAL]
    """Plan to check (JSON)."""
    reset_attention_mask: bool = False
    """Count the masks that a run with this option holds."""
    data: Path | None = None
    """Prepared text: print how uneven its documents make the attention of context-parallel ranks (cp_size)."""


class ConvertOptions(Options, frozen=True, kw_only=True):
    """Write the model of a checkpoint, saved under any plan, as a folder that transformers' from_pretrained opens.

    For a model described with --lora an adapter is written, as a folder that peft opens.
    """

    checkpoint: Annotated[Path, POSITIONAL]
    """Checkpoint (step-…), or the DONE.json of a run, which names its last and its best."""
    plan: Path
    """A plan for the same model (JSON)."""
    out: Path
    """Folder to write: config.json, safetensors, and their index if there are several."""
    best: bool = False
    """Use the best checkpoint that DONE.json names instead of the last, for a run with --keep-best."""
    copy_from: Path | None = None
    """Folder whose tokenizer, generation configuration and names of classes are copied along."""
    dtype: Dtype | None = None
    """Format of the weights; by default as they were saved."""
    file_gib: Gib = 5.0
    """Largest size of a file in GiB; one file at a time is held in memory."""


class MeasureOptions(RankOptions, frozen=True, kw_only=True):
    """Run plans for some steps on random tokens and report time (s) and memory (bytes) of every rank.

    A measurement that was cut off resumes when it is started again.
    """

    plans: Annotated[tuple[Path, ...], POSITIONAL]
    """Files with plans; for a prediction, its runners-up."""
    out: Path
    """Measurement to write (JSON)."""
    steps: Count = 5
    """Number of timed steps of each plan; up to 3 times as many if times scatter by over 10 %."""
    warmup_steps: Count = 2
    """Number of steps before the timed ones."""
    min_time_s: Seconds = 0.0
    """Measure each plan for at least this many seconds, whatever the steps."""
    trace: Path | None = None
    """Folder for Chrome traces, PLAN-HASH.rankN.json.gz for each plan and rank: PyTorch's profile of one additional
    step, with passes named as in `forward microbatch 0 chunk 0`. ui.perfetto.dev opens them; each rank is a separate
    process, so the `traceEvents` of several can be merged."""


class RunJob(RunOptions, frozen=True, kw_only=True, tag="run"):
    """The options of a run for its ranks, and the locks that the run holds."""

    locks: tuple[HeldLock, ...] = ()


class MeasureJob(MeasureOptions, frozen=True, kw_only=True, tag="measure"):
    """The job of one launch's ranks: measure plans of one world size, given in one file, for a combined result."""

    journal: Path
    """Path of the journal of finished plans, in case the measurement is interrupted."""


def encode_job(job: RunJob | MeasureJob) -> bytes:
    """Return the content of the file from which ranks read a job."""
    return msgspec.json.encode(job, enc_hook=str)


def decode_job(content: bytes) -> RunJob | MeasureJob:
    """Return the job in a file's content."""
    return msgspec.json.decode(content, type=RunJob | MeasureJob, dec_hook=lambda kind, value: kind(value))
