"""Five families in bfloat16 and float32 beside stock transformers: loss and every gradient of a step on one device.

The tolerance is not chosen: stock transformers is itself so far from the same step in the next wider format, by the
rounding of its own operations. Two computations that each are so far from the exact one are at most twice as far from
each other (the triangle inequality), and that is what is held.
"""

from typing import Any

import torch
from gpu_parts.setting import Setting
from gpu_parts.workbench import (
    MIXED,
    any_kernel,
    batch_of,
    described,
    engine_of,
    logits_of,
    memory_given_back,
    one_device_plan,
    step_of,
    stock_of,
)
from torch import Tensor, nn

from shardwright_formats.types import Precision
from shardwright_train.data.objectives import Batch
from shardwright_train.models.attention_kernels import settle_attention
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World

FAMILIES = ("llama", "gpt2", "bert", "t5", "vit")
FORMATS = (
    ("float32", Precision(), torch.float32, torch.float64),
    ("bfloat16", MIXED, torch.bfloat16, torch.float32),
)
_TRIANGLE = 2.0


def configuration(family: str, width: int, layers: int, vocabulary: int, length: int) -> dict[str, Any]:
    """A model of a family without dropout, with heads of 1/8 of its width."""
    match family:
        case "llama":
            return {
                "model_type": "llama",
                "vocab_size": vocabulary,
                "hidden_size": width,
                "intermediate_size": 3 * width,
                "num_hidden_layers": layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": length,
                "tie_word_embeddings": False,
            }
        case "gpt2":
            off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
            sizes = {"n_embd": width, "n_layer": layers, "n_head": 8, "n_positions": length}
            tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
            return {"model_type": "gpt2", **tokens, **sizes, **off}
        case "bert":
            off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
            tokens = {"vocab_size": vocabulary, "pad_token_id": vocabulary - 2, "mask_token_id": vocabulary - 1}
            more = {"num_attention_heads": 8, "max_position_embeddings": length}
            return {"model_type": "bert", **tokens, **sizes, **more, **off}
        case "t5":
            sizes = {"d_model": width, "d_kv": width // 8, "d_ff": 3 * width, "num_heads": 8}
            stacks = {"num_layers": layers // 2, "num_decoder_layers": layers // 2, "feed_forward_proj": "gated-gelu"}
            tokens = {"vocab_size": vocabulary, "decoder_start_token_id": 3}
            return {"model_type": "t5", **tokens, **sizes, **stacks, "dropout_rate": 0.0}
        case _:
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
            image = {"image_size": int(length**0.5) * 16, "patch_size": 16, "num_labels": 10}
            return {"model_type": "vit", "num_attention_heads": 8, **sizes, **image}


def of_rank(setting: Setting, world: World) -> dict[str, Any]:
    """The distances of every family in both formats."""
    width, layers, vocabulary, length, samples = setting.size((512, 4, 8192, 256, 8), (32, 2, 61, 16, 2))
    groups = Groups(setting.device_type)
    found = {}
    for family in FAMILIES:
        world.heartbeat.begin(f"at {family}")
        config = configuration(family, width, layers, vocabulary, length)
        for name, precision, dtype, wider in FORMATS:
            with memory_given_back(world.device):
                found[f"{family} {name}"] = _compared(
                    setting, world, groups, config, length, samples, precision, dtype, wider
                )
    return {"rows": found, "agrees": all(row["agrees"] for row in found.values())}


def _compared(
    setting: Setting,
    world: World,
    groups: Groups,
    config: dict[str, Any],
    length: int,
    samples: int,
    precision: Precision,
    dtype: torch.dtype,
    wider: torch.dtype,
) -> dict[str, Any]:
    family = config["model_type"]
    model = described(config, f"parity-{family}", length if family != "vit" else _patches(config))
    plan = one_device_plan(setting, model, family, samples, precision=precision)
    (kernel,) = settle_attention([plan], world)
    engine = engine_of(plan, world, groups, kernel)
    batch = batch_of(model, samples, seed=0)
    loss = float(engine.forward_backward(step_of(engine, batch)))
    own = _gradients_of(engine)
    on_device = {name: x.to(world.device) for name, x in batch.items()}
    stocks = "eager" if kernel == "eager" else "sdpa"
    with any_kernel():
        stock_losses, stock = _stock_step(stock_of(engine, stocks, dtype), on_device)
        exact_losses, exact = _stock_step(stock_of(engine, stocks, wider), on_device)
    # The mean of the tokens' errors is at most their root mean square; the mean itself is rounded to float32 once.
    rounding = float((stock_losses - exact_losses).square().mean().sqrt())
    allowed = _TRIANGLE * rounding + torch.finfo(torch.float32).eps * abs(loss)
    loss_distance = abs(loss - float(stock_losses.mean()))
    gradient_rounding, gradient_distance = _relative(stock, exact), _relative(own, stock)
    return {
        "attention": kernel,
        "loss": loss,
        "stock_loss": float(stock_losses.mean()),
        "loss_distance": loss_distance,
        "loss_tolerance": allowed,
        "gradient_distance": gradient_distance,
        "gradient_tolerance": _TRIANGLE * gradient_rounding,
        "own_gradient_rounding": _relative(own, exact),
        "worst_parameter": _worst(own, stock, exact),
        "agrees": loss_distance <= allowed and gradient_distance <= _TRIANGLE * gradient_rounding,
    }


def _patches(config: dict[str, Any]) -> int:
    return (config["image_size"] // config["patch_size"]) ** 2 + 1


def _gradients_of(engine: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """By the names of transformers; those of replicas are sums already."""
    context = engine.stage.context
    model, family, aliases = context.plan.model, context.family, {b: a for a, b in context.plan.model.tied}
    found: dict[str, Tensor] = {}
    for layer in engine.stage.layers:
        for name, parameter in layer.parallel.parameters.items():
            full = family.hugging_face_name(model, layer.name, name)
            found[aliases.get(full, full)] = local_tensor(parameter.grad).double()
    return found


def _stock_step(stock: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every label that counts, and the gradients of their mean."""
    logits, labels = logits_of(stock, batch).flatten(0, -2), batch["labels"].flatten()
    wide = logits if logits.dtype is torch.float64 else logits.float()
    losses = nn.functional.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)[labels != IGNORED]
    losses.mean().backward()
    gradients = {name: p.grad.double() for name, p in stock.named_parameters() if p.grad is not None}
    return losses.detach().double(), gradients


def _relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The 2-norm of all differences over that of all wanted values."""
    if set(found) != set(wanted):
        raise SystemExit(f"not the same parameters: {sorted(set(found) ^ set(wanted))[:3]}")
    difference = sum(float((found[name].view(x.shape) - x).square().sum()) for name, x in wanted.items())
    return float((difference / sum(float(x.square().sum()) for x in wanted.values())) ** 0.5)


def _worst(own: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    """The parameter that is farthest off, by its distance over what is allowed; those without rounding are left out."""
    ratios = {
        name: float((own[name].view(x.shape) - x).norm()) / (_TRIANGLE * rounding)
        for name, x in stock.items()
        if (rounding := float((x - exact[name]).norm())) > 0
    }
    name = max(ratios, key=lambda name: ratios[name])
    return {"name": name, "distance_over_allowed": ratios[name]}


def lines(result: dict[str, Any]) -> list[str]:
    """The table of the page."""
    head = [
        "Distance from stock transformers on the same device, and what is allowed: twice stock's own distance from the "
        "next wider format. The last column is of single parameters, where chance counts for more.",
        "",
        "| family | format | attention | loss | allowed | gradients | allowed | agrees | farthest parameter |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return [*head, *(_line(name, row) for name, row in result["rows"].items())]


def _line(name: str, row: dict[str, Any]) -> str:
    loss = f"{row['loss_distance']:.1e} | {row['loss_tolerance']:.1e}"
    gradients = f"{row['gradient_distance']:.1e} | {row['gradient_tolerance']:.1e}"
    farthest = f"{row['worst_parameter']['distance_over_allowed']:.2f} of what is allowed"
    verdict = "yes" if row["agrees"] else "**no**"
    return f"| {name.replace(' ', ' | ')} | {row['attention']} | {loss} | {gradients} | {verdict} | {farthest} |"
