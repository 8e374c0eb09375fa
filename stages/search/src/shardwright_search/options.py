"""The options of the planner's commands."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, field

from shardwright.command import POSITIONAL, Off, Options
from shardwright.estimate.runtimes import RuntimeOptions
from shardwright.models.adapter_config import read_adapter
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt
from shardwright.types import GradientReduction, Model, OptimizerName, Precision, Schedule
from shardwright.types.limits import Count, Gib, NonNegativeNumber, PositiveNumber, Samples, Seconds, Share, Tokens
from shardwright.types.plan import Attention, Base, ComputeType, DType
from shardwright.types.strategy import ContextParallel, DataParallel, Recompute, SequenceParallel
from shardwright_search.cost_model.time_model import TimeModel


class TrainedParts(RuntimeOptions, frozen=True, kw_only=True):
    """The trained parts of a model: all of it, all except frozen parameters, or added low-rank matrices."""

    frozen: tuple[str, ...] = ()
    """Part that is not trained: embedding, head, layers, layers[2] or layers[0:8], and after a dot which parameters,
    as in layers.mlp.*; may be repeated."""
    lora: Path | None = None
    """An adapter_config.json of peft, or its folder: only the low-rank matrices that it names are trained."""

    def trained(self, model: Model) -> Model:
        """Return the description with these options applied; BadInput if they cannot be."""
        if self.frozen:
            model = freeze(model, tuple(map(FrozenPart.parse, self.frozen)))
        if self.lora is None:
            return model
        return adapt(model, *read_adapter(self.lora))


Imbalance = Annotated[
    str | None,
    Meta(
        description="Positions that the experts of the fullest rank get, over the mean of all ranks: a ratio from 1 to "
        "the number of ranks over which experts are sharded, or a load that a run logged (shardwright.expert_load, "
        "JSON); by default all ranks get equally many."
    ),
]


class ProfileOptions(Options, frozen=True, kw_only=True):
    """Options for the files that plans are priced with."""

    hardware: tuple[Path, ...]
    """Hardware profile of the cluster (HDF5); of a mixed one also several, one for each device."""
    profile: tuple[Path, ...]
    """Model profile on the cluster's device (HDF5); of a mixed cluster one for each device."""
    correction: Path | None = None
    """Factors that measured plans taught (shardwright.correction, JSON), to be applied; of one device only."""
    imbalance: Imbalance = None


class ModelOptions(ProfileOptions, frozen=True, kw_only=True):
    """Options for the files of a search, except its request."""

    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""


class System(StrEnum):
    """Systems that plans can be exported for."""

    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    GALVATRON = "galvatron"
    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"


class PlanOptions(ModelOptions, frozen=True, kw_only=True):
    """Find the best plan that fits the memory budget of the search file, and prove it."""

    search: Path
    """Search file (shardwright.search, JSON); its memory_gib is in GiB."""
    out: Path
    """Plan file to write; PLAN.prediction.json is written next to it."""
    target: System | None = field(default=None, name="for")
    """The system that is to run the plan: only the part of the search file's space that it runs is searched, so that
    `export` writes it."""
    time_limit: Seconds | None = None
    """Seconds after which the best plan so far is taken, with the gap that is proven; Ctrl-C takes it, too."""
    runners_up: bool = False
    """Also search the best plans that differ, and write them into the prediction; `explain` shows them."""
    certificate: Path | None = None
    """Certificate of the bound to write (shardwright.certificate, JSON), for `verify`."""


class GridOptions(ProfileOptions, frozen=True, kw_only=True):
    """Search every cell of a grid: many searches of one model on one cluster.

    Cells whose answer is in the folder already are not searched again; one that has no plan does not stop the others.
    """

    grid: Annotated[Path, POSITIONAL]
    """Grid file (shardwright.grid, JSON); its memory_gib are in GiB."""
    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""
    folder: Path
    """Folder that keeps the answers, named by a hash of all that they depend on; several grids may share it."""
    out: Path
    """List of the answers to write (shardwright.grid_answers, JSON)."""
    time_limit: Seconds | None = None
    """Seconds for each cell after which the best plan so far is taken, with its gap."""


class AdviseOptions(TrainedParts, frozen=True, kw_only=True):
    """Say whether a model fits a cluster, the best plan, and what it yields: no GPU, no profile, nothing measured.

    From the model's shapes and published figures of the GPUs. Memory is in GiB, speed in tokens/s and as model FLOPs
    utilization (MFU), price in USD per billion tokens.
    """

    model: Annotated[str, POSITIONAL]
    """A Hugging Face config.json, its folder, or a preset such as llama-3-8b."""
    gpus: str
    """NODESxGPUS:DEVICE (`shardwright devices`), as 8x8:H100-SXM; of several types 2x8:A100-40+2x8:H100-SXM."""
    batch: Samples | None = None
    """Samples of a step, of all GPUs together; by default as many for each GPU as make about 4 Mi tokens."""
    taken_as: str | None = field(default=None, name="as")
    """A family, such as llama or mixtral, by whose shapes a config.json of an unknown type is priced, approximately."""
    seq: Tokens | None = None
    """Tokens of a sample; by default a preset's own, for a config.json 4096 or its maximum if that is less."""
    target: System | None = field(default=None, name="for")
    """The system that is to run the plan: only plans that it runs are searched, priced with its runtime unless
    --runtime names another, and the command that starts the plan is printed."""
    launch: Path | None = None
    """New folder for the files that start the plan in the system of --for, else here: by hand, in Docker, on Slurm,
    Kubernetes (JobSet, Kubeflow), SkyPilot."""
    take: str = "best"
    """The plan that --out and --launch write: best (the answer), fastest, uniform, runner-up:N, a rule:NAME, or one of
    --against."""
    against: tuple[str, ...] = ()
    """A choice to compare with the best plan: tp=8,pp=4,mbs=1,zero=1, a file of another system as --launch writes it
    (Megatron-LM arguments, a torchtitan TOML), or rule:tp8, rule:smallest, rule:nvidia-table."""
    precision: Literal["float32", "bfloat16", "float16", "fp8", "nvfp4"] = "bfloat16"
    """Type of forward and backward (fp8 and nvfp4: of the matrix products of blocks, only estimated)."""
    parameters: Literal["float32", "bfloat16"] | None = None
    """Type of stored parameters and of the optimizer's states; by default float32, and bfloat16 with --lora, as such
    runs have it."""
    reduce: Literal["float32", "bfloat16"] | None = None
    """Type of gradients that are summed up and reduced; by default the type of the stored parameters."""
    optimizer: tuple[Literal["any", OptimizerName], ...] = ("adamw",)
    """Optimizer; repeat it, or give `any`, to choose the one with the fastest plan."""
    offload: Literal["none", "optimizer", "update", "activations", "any"] = "none"
    """What layers may keep in host memory, if it makes room: optimizer states, which the device updates, or the host
    (update), activations, or any of these."""
    recompute: Literal["parts"] | None = None
    """`parts`: layers may also recompute norms, activation functions and matrix products with latents one by one, in
    any combination; by default nothing, all, or all except matrix products and attention."""
    host_memory_gib: Gib | None = None
    """Host memory of a node for that, in GiB; by default twice the memory of its GPUs."""
    loss_chunks: Count = 1
    """Chunks of positions whose logits exist one at a time, recomputed in the backward pass."""
    base: Base | None = None
    """Frozen matrices of blocks in 8 or 4 bits, as QLoRA has them: only estimated."""
    compile: bool = False
    """Blocks compiled by torch.compile, which starts fewer kernels."""
    tuned: bool = False
    """Experts as the runtime's recipes for speed run them, which needs the flags that are printed; without it, plain
    experts are searched, and the tuned time is shown, too."""
    uniform: bool = False
    """Only plans with one strategy for all layers, as Megatron-LM and torchtitan run them."""
    schedules: bool = False
    """Show the best plan of each schedule, zero_bubble included; each is searched for 5 CPU seconds, or 10."""
    tolerance: Share = 0.02
    """The answer is the simplest plan within this share of the best; 0: it is the fastest plan."""
    mtp: Annotated[int, Meta(ge=0, le=8)] = 0
    """Layers that predict further tokens, as DeepSeek-V3 has one; this runtime and Megatron-LM train them."""
    budget_gib: Gib | None = None
    """The most that a plan may use of a GPU, in GiB; by default 92 % of its memory, or all of it if nothing fits so."""
    price_per_gpu_hour: NonNegativeNumber | None = None
    """USD; by default what one provider asks."""
    imbalance: Imbalance = None
    inter_node_gbit_s: str | None = None
    """Gbit/s from one node to others, by default as in NVIDIA's own; 2:400,4:300 by the nodes that a group spans."""
    time_limit: Seconds = 20.0
    """Seconds of CPU time, which a busy machine does not shorten, until the best plan so far is taken, with its gap."""
    out: Path | None = None
    """Plan file to write."""
    html: Path | None = None
    """Page to write that opens offline: the answer with its pictures, and the front of memory against time."""
    html_limit: Seconds = 30.0
    """CPU seconds for the searches of that front; the page says what was not computed in time."""

    @property
    def formats(self) -> Precision:
        """Return the requested number formats."""
        stored = self.parameters or ("bfloat16" if self.lora and self.precision == "bfloat16" else "float32")
        base = UNSET if self.base is None else self.base
        return Precision(parameters=stored, compute=self.precision, reduce=self.reduce or stored, base=base)


class EvaluateOptions(ProfileOptions, frozen=True, kw_only=True):
    """Predict step time (s) and memory (bytes) of any plan."""

    plan: Annotated[Path, POSITIONAL]
    """Plan file (shardwright.plan, JSON)."""
    out: Path
    """Prediction file to write (shardwright.prediction, JSON)."""
    time_model: TimeModel = TimeModel.INTERPOLATE
    """How times are read off the profile; sequence: at any length, too."""


class PlaceOptions(Options, frozen=True, kw_only=True):
    """Place each layer's experts on ranks so that the fullest gets as little as possible of a load that a run logged.

    Shows the fullest rank's positions over the mean rank's before and after, and a lower bound; with profiles also what
    a step gains. A run under the new plan resumes from checkpoints of the old one.
    """

    plan: Annotated[Path, POSITIONAL]
    """Plan file (shardwright.plan, JSON)."""
    load: Path
    """Load of experts of a run of the model (shardwright.expert_load, JSON)."""
    out: Path
    """Plan file to write."""
    hardware: tuple[Path, ...] = ()
    """Hardware profile of the cluster (HDF5), of a mixed one for each device: with --profile, the times of a step are
    shown, and OUT.prediction.json is written too."""
    profile: tuple[Path, ...] = ()
    """Model profile (HDF5): see --hardware."""


class SimulateOptions(ProfileOptions, frozen=True, kw_only=True):
    """Simulate a step of a plan: its time (ms), a lower bound, the closed form, and how much each stage idles."""

    plan: Annotated[Path, POSITIONAL]
    """Plan file (shardwright.plan, JSON)."""
    svg: Path | None = None
    """Picture of the timeline to write; its axis is in ms."""
    trace: Path | None = None
    """Chrome trace to write (JSON, for Perfetto; times in µs)."""
    time_model: TimeModel = TimeModel.INTERPOLATE
    """How times are read off the profile; sequence: at any length, too."""


class ExplainOptions(ProfileOptions, frozen=True, kw_only=True):
    """Show time (ms) and memory (MiB) of a plan by term and pipeline stage, what binds, and known runners-up.

    With --search also the runners-up that the prediction does not have, the best plan of each neighbouring kind, and
    the gain by more memory, faster links or another node. With OTHER also how the two plans differ.
    """

    plan: Annotated[Path, POSITIONAL]
    """Plan file (shardwright.plan, JSON)."""
    other: Annotated[Path | None, POSITIONAL] = None
    """A second plan for the same model, to be compared."""
    search: Path | None = None
    """The search file that made PLAN: for runners-up, neighbouring kinds, and the gain by more memory, links, nodes."""
    time_limit: Seconds | None = None
    """Seconds for each search that --search needs."""


class CorrectOptions(Options, frozen=True, kw_only=True):
    """Learn from measured plans by which factor each term of a prediction is off; the profiles stay as they are.

    A search uses the factors only if it is given the file with --correction.
    """

    measurements: Annotated[tuple[Path, ...], POSITIONAL]
    """Measured plans (JSON)."""
    hardware: Path
    """Hardware profile that the plans were predicted with (HDF5)."""
    profile: Path
    """Model profile that the plans were predicted with (HDF5)."""
    out: Path
    """Correction file to write (shardwright.correction, JSON)."""


class UniformRequest(Options, frozen=True, kw_only=True):
    """The one strategy of all layers, the strategy of embedding and head, and how a step is scheduled."""

    global_batch_size: Count
    """Samples of a step."""
    num_microbatches: Count = 1
    """Microbatches of a step."""
    tp_size: Count = field(default=1, name="tp")
    """tp_size: ranks of a tensor-parallel group."""
    tp_consecutive: Annotated[bool, Off("--tp-strided")] = True
    """Tensor-parallel groups of neighbouring ranks, or of ranks with a distance of dp."""
    cp_size: Count = field(default=1, name="cp")
    """cp_size: ranks over which the positions of a sample are split, also in embedding and head."""
    context: ContextParallel = ContextParallel.GATHER
    """How positions attend to positions of other ranks, if cp is above 1."""
    ep_size: Count | None = field(default=None, name="ep")
    """ep_size: parts into which experts are sharded; by default each rank has its share of the features of all."""
    etp_size: Count | None = field(default=None, name="etp")
    """etp_size: ranks over which the features of each expert of a part are split."""
    pp_size: Count = field(default=1, name="pp")
    """pp_size: pipeline stages."""
    data_parallel: DataParallel = DataParallel.DDP
    """How states are sharded over data-parallel ranks."""
    shard_size: Count | None = None
    """Ranks over which ZeRO shards states; by default all."""
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    """How the sequence is split over a tensor-parallel group."""
    recompute: Recompute = Recompute.NONE
    """Which activations are computed again in the backward pass."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Order of the microbatches."""
    layer_ranges: Count = 1
    """Layer ranges of a pipeline stage, with --schedule interleaved_1f1b."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    """When gradients are reduced."""
    vocab_tp_size: Count | None = field(default=None, name="vocab_tp")
    """tp_size of embedding and head; by default as for the layers."""
    vocab_data_parallel: DataParallel | None = None
    """data_parallel of embedding and head; by default as for the layers."""
    vocab_sequence_parallel: SequenceParallel | None = None
    """sequence_parallel of embedding and head; by default as for the layers."""
    precision_parameters: DType = "float32"
    """Type of stored parameters."""
    precision_compute: ComputeType = "float32"
    """Type of forward and backward; fp8 and nvfp4 are only estimated."""
    precision_reduce: DType = "float32"
    """Type of gradient reduction."""
    optimizer: OptimizerName = "adamw"
    """Optimizer."""
    loss_chunks: Count = 1
    """Chunks of positions whose logits exist one at a time, recomputed in the backward pass."""
    attention: Attention = Attention.AUTO
    """Attention kernel."""
    compile: bool = False
    """Compile each layer with torch.compile."""

    @property
    def precision(self) -> Precision:
        """Return the three formats as one value."""
        return Precision(
            parameters=self.precision_parameters, compute=self.precision_compute, reduce=self.precision_reduce
        )


class UniformOptions(UniformRequest, frozen=True, kw_only=True):
    """Write the plan that shards every layer alike; with profiles its predicted time (s) and memory (bytes) too."""

    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""
    out: Path
    """Plan file to write."""
    name: str | None = None
    """Name of the plan; by default the name of the file."""
    hardware: Path | None = None
    """Hardware profile (HDF5): with --profile, PLAN.prediction.json is written too."""
    profile: Path | None = None
    """Model profile (HDF5): see --hardware."""
    imbalance: Imbalance = None


class ExportOptions(Options, frozen=True, kw_only=True):
    """Write a plan for another system, or say in one line what that system cannot express."""

    plan: Annotated[Path, POSITIONAL]
    """Plan file (shardwright.plan, JSON)."""
    to: System
    """The system that is to run the plan."""
    runner_up: Count | None = None
    """Number of a runner-up in PLAN's prediction, to export in its place; 1 is the first."""
    against: str | None = None
    """A choice as `advise --against` takes it, to export in the place of PLAN, with its model, devices and batch."""
    out: Path
    """The system's file to write: JSON, command-line arguments or TOML."""
    launch: Path | None = None
    """New folder for the files that start the plan on its nodes: by hand, in Docker, on Slurm, on Kubernetes (JobSet,
    Kubeflow's TrainJob), on rented ones (SkyPilot), with accelerate's launch file or the module of torchtitan 0.3."""
    hosts: Path | None = None
    """Hosts for --launch, one host name and its node type per line; hosts of a type in the order of the pipeline."""


class GalvatronRun(Options, frozen=True, kw_only=True):
    """Options of a run that a plan needs and Galvatron's strategy file does not contain."""

    sequence_parallel: Literal["none", "megatron"] | None = None
    """Whether the run has Galvatron's --sequence-parallel; needed if tp is above 1."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    """every_microbatch for its --no_async_grad_reduce."""
    num_microbatches: Count | None = None
    """Number of microbatches, in place of the file's chunks if these have unequal sizes."""
    precision_compute: DType = "bfloat16"
    """Its --mixed_precision: type of forward and backward."""
    precision_reduce: DType | None = None
    """float32 for its --reduce_in_fp32; by default as computed."""
    attention: Attention = Attention.AUTO
    """Attention kernel."""

    @property
    def precision(self) -> Precision:
        """Return the formats as one value; parameters are stored in float32."""
        return Precision(compute=self.precision_compute, reduce=self.precision_reduce or self.precision_compute)


class ImportGalvatronOptions(GalvatronRun, frozen=True, kw_only=True):
    """Write the plan that Galvatron would run; options give the settings of its run that its file does not contain."""

    config: Annotated[Path, POSITIONAL]
    """Galvatron's strategy file (JSON)."""
    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""
    out: Path
    """Plan file to write."""
    name: str | None = None
    """Name of the plan; by default the name of the file."""


class NewOptions(Options, frozen=True, kw_only=True):
    """Write a configuration of the workflow for a model, nodes and data; what is not given is asked for on a terminal.

    The plan is made from estimates, as `advise` makes it; the run trains with it.
    """

    model: str | None = None
    """A preset, such as llama-3.1-8b."""
    gpus: str | None = None
    """NODESxGPUS:DEVICE, as 8x8:H100-SXM; of several types 2x8:A100-40+2x8:H100-SXM."""
    data: str | None = None
    """A file or folder of text, for ViT and Swin of images for each class; or random: random samples."""
    tokenizer: Path | None = None
    """Folder of the model's own tokenizer; by default one is trained on the text."""
    batch: Samples | None = None
    """Samples of a step, of all GPUs together; by default as many for each GPU as make about 4 Mi tokens."""
    inter_node_gbit_s: PositiveNumber | None = None
    """Gbit/s from one node to others; by default as in NVIDIA's own nodes."""
    steps: Annotated[int, Meta(ge=1, lt=10**8)] = 1000
    """Steps of the training."""
    out: Path = Path("shardwright.yaml")
    """Configuration to write, YAML; it must not exist yet."""


class ModelsOptions(Options, frozen=True, kw_only=True):
    """List the models that are known by name, and the families of models that are read from a config.json."""

    model: Annotated[str | None, POSITIONAL] = None
    """A preset or a family, to see the source and the keys of its presets."""


class DevicesOptions(Options, frozen=True, kw_only=True):
    """List the devices that can be planned for: memory, peak of dense matrix products, and who published it."""

    device: Annotated[str | None, POSITIONAL] = None
    """A device, to see every figure with its source."""


class VerifyOptions(ProfileOptions, frozen=True, kw_only=True):
    """Confirm without searching that no plan of a search's space is faster than its certificate says."""

    plan: Annotated[Path, POSITIONAL]
    """Plan file that a search wrote (shardwright.plan, JSON)."""
    certificate: Annotated[Path, POSITIONAL]
    """The certificate that it wrote (shardwright.certificate, JSON)."""
    search: Path
    """The search file (shardwright.search, JSON)."""
    cluster: Path | None = None
    """Cluster (shardwright.cluster, JSON) that the plan must be for."""
    model: Path | None = None
    """Model description (shardwright.model, JSON) that the plan must be for."""


class ExploreOptions(Options, frozen=True, kw_only=True):
    """Serve a page on this machine on which model, GPUs, batch, length, system and budget are changed and searched.

    The address that is printed has a token and works only on this machine; Ctrl-C ends it.
    """

    link: Annotated[str | None, POSITIONAL] = None
    """Address of somebody else's page, or the part after its question mark: its settings are taken."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port; 0: a free one."""


class RentOptions(Options, frozen=True, kw_only=True):
    """Find which nodes to rent: the exact front of step time (s) against price (USD per step) over all sub-clusters.

    For a model by name, from published figures: `rent gpt2-xl --gpus 0-8x8:A100-80+0-8x8:A10 --batch 128`; or from
    files (--cluster, --model, --search, --hardware, --profile), measured or not. Every point is a complete plan. Ctrl-C
    takes what is found so far, and says what is proven.
    """

    preset: Annotated[str | None, POSITIONAL] = field(default=None, name="name")
    """A Hugging Face config.json, its folder, or a preset such as gpt2-xl."""
    gpus: str | None = None
    """NODESxGPUS:DEVICE, whose NODES may be a range or a list, as 0-8x8:A100-80 or 0,4,8x8:A10; types joined by +."""
    batch: Samples | None = None
    """Samples of a step; by default as many for each GPU as make about 4 Mi tokens on all nodes."""
    seq: Tokens | None = None
    """Tokens of a sample; by default as `advise` takes them."""
    precision: Literal["float32", "bfloat16", "float16", "fp8", "nvfp4"] = "bfloat16"
    """Type of forward and backward, of a model by name."""
    budget_gib: Gib | None = None
    """The most that a plan may use of a GPU, in GiB; by default 92 % of its memory."""
    inter_node_gbit_s: str | None = None
    """Gbit/s from one node to others, as `advise` takes it."""
    price_per_gpu_hour: tuple[str, ...] = ()
    """DEVICE=USD, in place of one provider's price; may be repeated."""
    spot: tuple[str, ...] = ()
    """DEVICE=USD: nodes of this type are spot nodes at this price of a GPU hour, and are marked as such."""
    launch: Path | None = None
    """New folder for the files that start the plan of the point that --deadline or --price names, on SkyPilot and
    others."""
    cluster: Path | None = None
    """Cluster file (shardwright.cluster, JSON): of each node type the most that can be rented."""
    model: Path | None = None
    """Model description (shardwright.model, JSON)."""
    search: Path | None = None
    """Search file (shardwright.search, JSON) with one global_batch_size; its memory_gib is in GiB."""
    hardware: tuple[Path, ...] = ()
    """Hardware profile of the cluster (HDF5); of a mixed one also several, one for each device."""
    profile: tuple[Path, ...] = ()
    """Model profile on the cluster's device (HDF5); of a mixed cluster one for each device."""
    correction: Path | None = None
    """Factors that measured plans taught (shardwright.correction, JSON), to be applied; of one device only."""
    imbalance: Imbalance = None
    offers: Path | None = None
    """Offers file (shardwright.offers, JSON): prices (USD per hour), numbers of nodes."""
    out: Path | None = None
    """New folder: front.html, front.csv, front.h5 and front.svg, and for each point its plan and prediction."""
    steps: Count | None = None
    """Steps of the training."""
    tokens: PositiveNumber | None = None
    """Tokens of the training, instead of --steps."""
    deadline: PositiveNumber | None = None
    """Hours: name the cheapest point whose training takes no more."""
    price: PositiveNumber | None = None
    """USD: name the fastest point whose training costs no more."""
    time_limit: Seconds | None = None
    """Seconds after which what is found so far is taken."""
