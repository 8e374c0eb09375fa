"""A tiny Llama, random valid plans for it, and one launch that compares many plans with one process."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright_formats.cluster import Cluster, NodeGroup, NodeType
from shardwright_formats.files import write_document
from shardwright_formats.model import Model
from shardwright_formats.plan import GradientReduction, PipelineStage, Plan, Plans, Precision, Schedule
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_train.families import family_named
from shardwright_train.launch import Nodes, launch

LAYERS = 4
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}

PlanMaker = Callable[..., Plan]
Errors = dict[str, dict[str, float]]


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return family_named("llama", "test").describe(CONFIG, "tiny", 16)


def cluster_of(devices: int) -> Cluster:
    node = NodeType(device="cpu", devices_per_node=devices, memory_bytes=1 << 30)
    return Cluster(name="test", nodes=(NodeGroup(node_type="cpu", count=1),), node_types={"cpu": node})


def _random_strategy(ranks: int, draw: random.Random) -> dict[str, object]:
    tp_size = draw.choice([k for k in (1, 2, 4) if k <= ranks])
    return {
        "tp_size": tp_size,
        "dp_size": ranks // tp_size,
        "tp_consecutive": draw.random() < 0.6,
        "data_parallel": draw.choice(list(DataParallel)),
        "sequence_parallel": draw.choice([SequenceParallel.NONE, SequenceParallel.MEGATRON]),
    }


@pytest.fixture(scope="session")
def random_plan(tiny_model: Model) -> PlanMaker:
    """A plan drawn by number: other numbers give other plans, the same number the same."""

    def make(number: int, world_size: int, dtype: str = "float64", stages: int | None = None) -> Plan:
        draw = random.Random(f"{number}/{world_size}")
        count = stages or draw.choice([1, 2])
        ranks, cut = world_size // count, draw.choice([1, 2, 3])
        ranges = [(0, LAYERS)] if count == 1 else [(0, cut), (cut, LAYERS)]
        layers = (
            LayerStrategy(
                type="block",
                recompute=draw.choice([Recompute.NONE, Recompute.FULL]),
                **_random_strategy(ranks, draw),  # type: ignore[arg-type]
            )
            for _ in range(LAYERS)
        )
        return Plan(
            name=f"random {number} {dtype}",
            model=tiny_model,
            cluster=cluster_of(world_size),
            global_batch_size=16,
            num_microbatches=draw.choice([1, 2, 4]),
            schedule=draw.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B]),
            gradient_reduction=draw.choice(list(GradientReduction)),
            precision=Precision(
                parameters="float32" if dtype == "bfloat16" else dtype,  # type: ignore[arg-type]
                compute=dtype,  # type: ignore[arg-type]
                reduce="float32" if dtype == "bfloat16" else dtype,  # type: ignore[arg-type]
            ),
            stages=tuple(
                PipelineStage(ranks=tuple(range(i * ranks, (i + 1) * ranks)), layers=(ranges[i],)) for i in range(count)
            ),
            embedding=Strategy(**_random_strategy(ranks, draw)),  # type: ignore[arg-type]
            head=Strategy(**_random_strategy(ranks, draw)),  # type: ignore[arg-type]
            layers=tuple(layers),
        )

    return make


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Errors]:
    """Largest error of loss, gradients, norm and parameters after three steps, by plan; one launch for all.

    The last plan is compared once more under each mutation, under the mutation's name.
    """

    def run(plans: list[Plan], mutations: tuple[str, ...] = ()) -> Errors:
        folder = tmp_path_factory.mktemp("parity")
        plans_file, result = folder / "plans.json", folder / "errors.json"
        write_document(plans_file, Plans(plans=tuple(plans)))
        command = [sys.executable, str(Path(__file__).with_name("parity_worker.py")), str(plans_file), str(result)]
        launch([*command, *mutations], plans[0].world_size, 0, plans[0].world_size, Nodes())
        errors: Errors = json.loads(result.read_bytes())
        return errors

    return run
