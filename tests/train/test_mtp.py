"""Multi-token prediction: any plan trains it as one process does, and it is priced, read and written as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoint_worker import JOB, saved
from command_calls import call
from context_plans import with_context
from estimated_memory import CLUSTER, MIXED, estimated_profiles, held_bytes
from msgspec.structs import replace
from mtp_reference import mtp_losses
from offloaded import with_moved_activations
from parity_worker import auxiliary_of
from random_plans import bare_plan, random_plan, uneven_plan
from run_parity import TOLERANCE
from safetensors.torch import load_file, save_file
from shared_experts import with_shared_experts
from split_plans import split
from tiny_models import batch_of, engine_of, initial_stock, stock_logits, tiny
from torch import nn

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.models.mtp import mtp_layers, with_mtp
from shardwright.types import (
    HEAD,
    Attention,
    DataParallel,
    LayerStrategy,
    Model,
    PipelineStage,
    Plan,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright_train.checkpoints.folders import Identity
from shardwright_train.cli import APP
from shardwright_train.data.objectives import RandomBatches
from shardwright_train.data.share import BatchShare
from shardwright_train.dry_run import check_roles, simulate_step
from shardwright_train.engine.engine import build_engine
from shardwright_train.models.base import family_named
from shardwright_train.models.mtp import further_labels
from shardwright_train.models.support import check_supported
from shardwright_train.options import ConvertOptions
from shardwright_train.parallel.data import default_dtype
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.vocab import IGNORED
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import MTP_FACTOR, Step, evaluating, run_forward
from shardwright_train.weights.export import export
from shardwright_train.weights.reading import open_weights

Errors = dict[str, dict[str, float]]
Compare = Callable[..., Errors]
MUTATIONS = ("copies_of_tied_parameters_not_summed", "copies_counted_twice_in_the_norm")


def predicting(family: str, depths: int = 1, **changes: Any) -> Model:
    return with_mtp(tiny(family, **changes), depths)


V3, DENSE, TIED = predicting("deepseek_v3"), predicting("llama", 2), predicting("llama", tie_word_embeddings=True)
SHARED = predicting("mixtral", num_local_experts=8)


def _named(plan: Plan, name: str) -> Plan:
    return replace(plan, name=f"{name} {plan.name}")


def _apart(model: Model) -> Plan:
    """Four layers and a further one in a pipeline of two ranks, the further one with the head."""
    plan = random_plan(model, 0, 2, stages=2)
    layers = tuple(LayerStrategy(type=kind, tp_size=1, dp_size=1, recompute=Recompute.FULL) for kind in model.layers)
    cut = len(layers) - 1
    ranges = (0, cut), (cut, len(layers))
    stages = tuple(replace(stage, layers=(each,)) for stage, each in zip(plan.stages, ranges, strict=True))
    one = Strategy(tp_size=1, dp_size=1)
    plan = replace(plan, stages=stages, layers=layers, embedding=one, head=one, num_microbatches=4)
    return replace(plan, name="cut before the further layer", schedule=Schedule.ONE_F_ONE_B)


def _on_two() -> list[Plan]:
    """Experts that ranks share out, sequence parallelism, every kind of ZeRO, pipelines, documents, split passes."""
    drawn = [with_shared_experts(random_plan(V3, n, 2, stages=1), n) for n in (120, 121)]
    drawn += [random_plan(V3, 1, 2), random_plan(DENSE, 2, 2), random_plan(TIED, 3, 2), _apart(V3)]
    packed = _named(with_context(random_plan(DENSE, 7, 2, stages=1), 7), "packed completions")
    chunked = replace(random_plan(DENSE, 1, 2), loss_chunks=3, optimizer="muon", name="chunks, muon")
    return [*drawn, packed, chunked, split(random_plan(DENSE, 0, 2, stages=2)), random_plan(V3, 4, 2, stages=1)]


@pytest.fixture(scope="module")
def two_ranks(compare: Compare) -> Errors:
    return compare(_on_two(), MUTATIONS)


def test_plans_on_two_ranks_train_exactly_as_one_process(two_ranks: Errors) -> None:
    """Loss, each depth's loss, gradients, norm, loads of experts and parameters after three steps."""
    plans = [plan.name for plan in _on_two()]
    assert {name: two_ranks[name] for name in plans if max(two_ranks[name].values()) > TOLERANCE} == {}
    assert any(layer.sequence_parallel is SequenceParallel.MEGATRON for p in _on_two() for layer in p.layers)
    assert {layer.data_parallel for p in _on_two() for layer in p.layers if layer.dp_size > 1} == set(DataParallel)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_copies_of_the_token_table_that_are_not_one_are_seen(two_ranks: Errors, mutation: str) -> None:
    assert max(two_ranks[mutation].values()) > 1e-6


@pytest.mark.long
@pytest.mark.timeout(900)
def test_plans_on_four_ranks_train_exactly_as_one_process(compare: Compare) -> None:
    models = {"experts": V3, "dense": DENSE, "tied": TIED}
    plans = [_named(random_plan(model, n, 4), name) for name, model in models.items() for n in range(3)]
    plans += [with_shared_experts(random_plan(model, n, 4), n) for model in (V3, SHARED) for n in range(122, 125)]
    plans += [with_context(random_plan(V3, 200, 4, stages=2), 200), uneven_plan(V3, 0, 4), bare_plan(DENSE, 1, 4)]
    plans += [split(random_plan(V3, 5, 4, stages=2)), *with_moved_activations([random_plan(V3, 6, 4, stages=2)])]
    assert any(len(stage.layers) > 1 for plan in plans for stage in plan.stages)
    found = compare(plans)
    assert len(found) == len(plans)
    assert {name: errors for name, errors in found.items() if max(errors.values()) > TOLERANCE} == {}


def test_messages_of_a_step_are_counted_as_they_are_sent() -> None:
    for plan in (random_plan(TIED, 0, 2), with_shared_experts(random_plan(V3, 121, 2, stages=1), 121)):
        checks = check_roles(plan, family_named(plan.model.family, "test"), "sdpa", lambda *_: None)
        assert [check.miscounted for check in checks if check.miscounted] == []


CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize(
    "given",
    [
        {"tp_size": 1, "recompute": Recompute.FULL},
        {"tp_size": 2, "data_parallel": DataParallel.ZERO3, "sequence_parallel": SequenceParallel.MEGATRON},
        {"tp_size": 2, "recompute": Recompute.SELECTIVE},
    ],
)
def test_the_predicted_memory_is_that_of_a_step(depths: int, given: dict[str, Any]) -> None:
    model = with_mtp(model_of_config(CONFIG, "m", 1024, "config.json"), depths)
    sizes = given | {"dp_size": 4 // given["tp_size"]}
    ends = Strategy(**{name: value for name, value in sizes.items() if name != "recompute"})
    plan = Plan(
        name="p", model=model, cluster=CLUSTER, global_batch_size=16, num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B, precision=MIXED, attention=Attention.SDPA, embedding=ends, head=ends,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, len(model.layers)),)),),
        layers=tuple(LayerStrategy(type=kind, **sizes) for kind in model.layers),
    )  # fmt: skip
    held = held_bytes(plan, estimated_profiles(MIXED, (2, 4), model))
    assert held == pytest.approx(simulate_step(plan, 0, family_named("llama", "t"), "sdpa").peak_bytes, rel=0.01)


# Weights.


def _published(folder: Path, model: Model) -> nn.Module:
    """A stock model with random weights, in a folder as DeepSeek publishes it: with copies of table and head."""
    stock: Any = initial_stock(model, torch.float32)
    torch.manual_seed(0)
    biases = (x for name, x in stock.named_buffers() if name.endswith("_bias"))
    for parameter in (*stock.parameters(), *biases):
        nn.init.normal_(parameter, std=0.1)
    stock.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{len(model.layers) - 1}"
    tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return stock  # type: ignore[no-any-return]


def test_weights_go_in_and_come_out_under_the_published_names(one_rank: World, tmp_path: Path) -> None:
    plan = random_plan(V3, 0, 1, "float32")
    stock = _published(tmp_path / "in", V3)
    family = family_named("deepseek_v3", "test")
    context = RankContext(
        plan=plan, family=family, rank=0, groups=Groups("cpu"), attention="sdpa", device=one_rank.device, seed=0,
        weights=open_weights(tmp_path / "in", V3, family, allow_new=False),
    )  # fmt: skip
    engine = build_engine(context)
    checkpoint = saved(tmp_path / "saved", engine, Identity.of_run(JOB, plan, data_sha256="0" * 64))
    batch = batch_of(V3, plan.global_batch_size, 0)
    logits = stock_logits(stock, batch)
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    (further,) = mtp_losses(stock, batch)
    outcome = engine.train_step(Step.of_batch(batch, engine.stage.context.share))
    auxiliary = auxiliary_of(stock) / plan.global_batch_size
    assert outcome.mtp_losses == pytest.approx([further.item()], abs=1e-5)
    assert outcome.loss == pytest.approx((wanted + auxiliary + MTP_FACTOR * further).item(), abs=1e-5)
    write_document(tmp_path / "plan.json", plan)
    export(ConvertOptions(checkpoint=checkpoint, plan=tmp_path / "plan.json", out=tmp_path / "out"))
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert found.keys() == given.keys()
    assert [name for name, x in given.items() if not torch.equal(found[name], x)] == []
    names = {name.removeprefix("model.layers.4.").partition(".")[0] for name in found if ".layers.4." in name}
    assert {"enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head", "self_attn", "mlp"} <= names
    config = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (4, 1)


def test_a_folder_without_them_needs_new_weights_and_one_whose_copy_differs_is_refused(tmp_path: Path) -> None:
    family, folder = family_named("deepseek_v3", "test"), tmp_path / "in"
    _published(folder, V3)
    tensors = load_file(folder / "model.safetensors")
    other = {**tensors, "model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    table = torch.empty(61, 32)
    with pytest.raises(BadInput, match=r"model\.layers\.4\.embed_tokens\.weight differs from model\.embed_tokens"):
        open_weights(folder, V3, family, False).read(table, "model.embed_tokens.weight", (61, 32), ((0, 61), (0, 32)))
    main = {name: x for name, x in tensors.items() if ".layers.4." not in name}
    save_file(main, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks model\.layers\.4\.eh_proj\.weight, .* layers that predict further"):
        open_weights(folder, V3, family, False)
    assert "model.layers.4.enorm.weight" in open_weights(folder, V3, family, True).new


# Labels, evaluation, commands.


def test_an_evaluation_reports_the_loss_of_the_next_token(one_rank: World) -> None:
    plan, batch = random_plan(DENSE, 0, 1), batch_of(DENSE, 16, 0)
    with default_dtype(torch.float64):
        engine, stock = engine_of(plan, one_rank, Groups("cpu")), initial_stock(DENSE)
        with evaluating(engine.stage):
            total, labels = run_forward(engine.stage, engine.pipeline, batch).tolist()
        entropy = nn.functional.cross_entropy(stock_logits(stock, batch).flatten(0, 1), batch["labels"].flatten())
    assert total / labels == pytest.approx(entropy.item(), abs=1e-6)


def test_labels_further_ahead_are_counted_as_they_are_made() -> None:
    batches = RandomBatches(family_named("llama", "test").learns(DENSE), 0)  # type: ignore[arg-type]
    batch = batches.read(4, BatchShare(1, 3))
    made = further_labels(batch, 2)
    assert torch.equal(made[:, :-1, 0], batch["labels"][:, 1:]) and torch.equal(made[:, :-2, 1], batch["labels"][:, 2:])
    counts = [int((made[..., depth] != IGNORED).sum()) for depth in range(2)]
    assert counts == [batches.counted_ahead(4, 3, depth) for depth in (1, 2)] == [3 * 15, 3 * 14]


def test_describe_adds_the_layers_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    given = (str(tmp_path), "--name", "m", "--sequence-length", "64", "--out", str(tmp_path / "m.json"))
    assert call(APP, "describe", *given, "--mtp", "2").exit_code == 0
    model = read_document(tmp_path / "m.json", Model)
    assert mtp_layers(model.layers) == 2 and model.types[HEAD].labels == 3 * 64
    plain = model_of_config(CONFIG, "m", 64, "config.json")
    # A block, four norms of it and of each depth, and a matrix; copies count once.
    norms, block = 256 * (3 + 3), plain.types["block"].parameter_count()
    assert model.parameter_count == plain.parameter_count + 2 * (block + 2 * 256**2) + norms


def test_what_cannot_run_them_says_so() -> None:
    for family in ("gpt2", "qwen3"):
        with pytest.raises(BadInput, match=rf"further tokens \(mtp\) are trained for deepseek_v2, .*, not {family}:"):
            check_supported(random_plan(predicting(family), 0, 1), "plan.json")
    for family in ("t5", "bert", "llava"):
        with pytest.raises(BadInput, match=r"--mtp: .* is not a causal language model that is trained whole"):
            predicting(family)
    check_supported(random_plan(V3, 0, 1), "plan.json")
