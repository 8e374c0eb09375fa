"""`shardwright new`: a configuration of the workflow, from a model, its nodes and its data."""

import json
import sys
from difflib import get_close_matches
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.command import show
from shardwright.devices.table import read_devices
from shardwright.io import BadInput, check_writable, write_bytes
from shardwright.models.registry import FAMILIES, Preset, read_presets
from shardwright.types import GIB
from shardwright_search.advise.question import Machines, machines_of, question_of
from shardwright_search.options import AdviseOptions, NewOptions

_RANDOM = "random"
_VOCABULARY = 32000
"""The most tokens of a tokenizer that is trained on the text: as many as Llama 2's."""
_TEMPLATE = """\
# {model} on {gpus}, planned from shapes and published figures. In a clone of Shardwright:
#   snakemake --cores all plans --configfile FILE      the plan, in seconds, on any machine
#   snakemake --cores all --configfile FILE            the training, on these nodes; --profile slurm submits it
# Keys that are not said have their defaults: config/config.yaml explains each, config/README.md how to measure.
node_types:
{node_types}
clusters:
  cluster: {cluster}
models:
  {model}: {{preset: {model}, profile: estimated}}
profiles:
  estimated:
    source: analytic
    tp_sizes: {tp_sizes}
    sequence_parallel: [none, megatron]
    recompute: [none, full, selective]
    micro_batch_sizes: [1, 2, 4, 8, 16]
    precision: {{parameters: float32, compute: {compute}, reduce: float32}}
data: {data}
searches:
  {model}: {{model: {model}, cluster: cluster, global_batch_size: {batch}, recompute: [none, full, selective]}}
runs:
  {model}: {{search: {model}, data: {run_data}, steps: {steps}}}
validate: {{searches: [], steps: 1, warmup_steps: 1}}
"""


def write_configuration(options: NewOptions) -> None:
    """Ask for what the options leave open, and write the configuration."""
    if options.out.exists():
        raise BadInput(options.out, "already exists", "choose another --out, or remove it")
    check_writable(options.out)
    text = configuration_text(_answered(options))
    write_bytes(options.out, text.encode())
    show(f"wrote {options.out}; in a clone of Shardwright: snakemake --cores all plans --configfile {options.out}")


def _answered(options: NewOptions) -> NewOptions:
    """Return the options with model, GPUs and data; BadInput if one is neither given nor answered, or unknown."""
    presets = read_presets()
    model = options.model or _asked("--model", f"Model, one of {', '.join(presets)}")
    if model not in presets:
        close = get_close_matches(model, presets, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"give one of {', '.join(presets)}"
        raise BadInput("--model", f"{model!r} is not a preset", remedy)
    gpus = options.gpus or _asked("--gpus", "Nodes as NODESxGPUS:DEVICE, such as 8x8:H100-SXM")
    data = options.data or _asked("--data", f"Data, a file or folder, or {_RANDOM} for random samples")
    if data != _RANDOM and not Path(data).exists():
        raise BadInput("--data", f"{data!r} does not exist", f"name a file or a folder, or {_RANDOM}")
    return replace(options, model=model, gpus=gpus, data=data)


def _asked(option: str, question: str) -> str:
    """Return a line that is typed on a terminal; BadInput if there is no terminal, or the line is empty."""
    answer = ""
    if sys.stdin is not None and sys.stdin.isatty():
        show(f"{question}:")
        answer = sys.stdin.readline().strip()
    if not answer:
        raise BadInput(option, "is not given", "give it, or answer on a terminal")
    return answer


def configuration_text(options: NewOptions) -> str:
    """Return the configuration as YAML; raise BadInput if the model cannot be planned for the nodes."""
    assert options.model and options.gpus and options.data
    preset, rate = read_presets()[options.model], options.inter_node_gbit_s
    advice = AdviseOptions(
        model=options.model,
        gpus=options.gpus,
        batch=options.batch,
        inter_node_gbit_s=None if rate is None else f"{rate:g}",
    )
    machines = machines_of(advice, read_devices())
    has_bfloat16 = all(device.peak("bfloat16") for device in machines.devices.values())
    question = question_of(replace(advice, precision="bfloat16" if has_bfloat16 else "float16"))
    assert question.request.precision is not None
    data = {} if options.data == _RANDOM else {"corpus": _data(preset, options)}
    return _TEMPLATE.format(
        model=options.model,
        gpus=options.gpus,
        node_types="\n".join(_node_types(machines)),
        cluster=_yaml(_cluster(machines)),
        tp_sizes=list(question.tp_sizes),
        compute=question.request.precision.compute,
        data=_yaml(data),
        batch=question.request.global_batch_size,
        run_data=next(iter(data), _RANDOM),
        steps=options.steps,
    )


def _yaml(value: object) -> str:
    """Return a value on one line of YAML, which reads JSON, except for halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)


def _node_types(machines: Machines) -> list[str]:
    return [
        f"  {name}: "
        + _yaml(
            {
                "device": node.device,
                "devices_per_node": node.devices_per_node,
                "memory_gib": node.memory_bytes / GIB,
                **({} if node.domain_devices is UNSET else {"domain_devices": node.domain_devices}),
                "usd_per_hour": node.usd_per_hour,
            }
        )
        for name, node in machines.cluster.node_types.items()
    ]


def _cluster(machines: Machines) -> dict[str, object]:
    """Return the entry of the cluster; nodes of several types send at the rate of the slowest."""
    nodes = [{"node_type": group.node_type, "count": group.count} for group in machines.cluster.nodes]
    rates = [rate for network in machines.networks.values() for _, rate in network.up_to]
    network = {"inter_node_gbit_s": min(rates) * 8 / 1e9} if rates else {}
    return {"nodes": nodes, "hardware": "analytic", **network}


def _data(preset: Preset, options: NewOptions) -> dict[str, object]:
    """Return the entry for data: images for models without a vocabulary, else text, with images or speech."""
    facts = FAMILIES[preset.config["model_type"]]
    read = facts.configured(preset.config)
    if "vocab_size" not in read:
        return {"text": options.data, "source": "images", "image_size": read["image_size"]}
    of_text = {"vocab_size": min(_VOCABULARY, read["vocab_size"])}
    texts = of_text if options.tokenizer is None else {"tokenizer": str(options.tokenizer)}
    if facts.joined_by is not None:
        size = read["vision_config"]["image_size"]
        return {"text": options.data, "source": "captions", "image_size": size, **texts}
    if "num_mel_bins" in read:
        return {"text": options.data, "source": "speech", "mel_bins": read["num_mel_bins"], **texts}
    return {"text": options.data, **texts}
