"""Experts as systems run them: NVLink domains, dispatchers, overlap, the host's time, and published steps."""

import re
from collections.abc import Mapping
from functools import cache

import pytest
from msgspec import UNSET

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import ExpertHabits, Machine, estimate_experts
from shardwright.estimate.runtimes import Graphs, RuntimeName
from shardwright.io import BadInput
from shardwright.key import ExpertKey, HostKey
from shardwright.types import Cluster, NodeGroup, NodeType, Precision, Recompute
from shardwright.types.strategy import Dispatcher
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.report import ways_of_experts
from shardwright_search.advise.targeted import started
from shardwright_search.cost_model.experts import _different
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.options import AdviseOptions, System


def _step_s(asked: Question, text: str, profiles: Profiles | None = None) -> float:
    plan = reading_of(text, asked.setting).plan
    return evaluate(plan, profiles or asked.profiles, timeline=False).estimate.simulated_step_time_s


@cache
def _megatron(model: str, gpus: str, batch: int, **more: object) -> Question:
    return question_of(
        AdviseOptions(model=model, gpus=gpus, batch=batch, seq=4096, runtime=RuntimeName.MEGATRON_CORE, **more)
    )


_OVERLAP, _FUSED = "--overlap-moe-expert-parallel-comm", "--use-transformer-engine-op-fuser"
_QWEN_ON_RACKS = "tp=1,pp=4,vpp=12,ep=32,etp=1,mbs=2,zero=1"


def test_a_tuned_megatron_takes_what_its_verification_cards_measured():
    """Qwen3-235B on 256 GB300 took 14.92 s; Qwen3-30B on 16 H100 20.15 s, and 30.29 s without overlap."""
    racks = _megatron("qwen3-235b-a22b", "64x4:GB300", 8192, precision="fp8", tuned=True)
    assert _step_s(racks, _QWEN_ON_RACKS) == pytest.approx(14.92, rel=0.1)
    small = _megatron("qwen3-30b-a3b", "2x8:H100-SXM", 1024)
    shape = "tp=1,pp=1,ep=16,etp=1,mbs=1,zero=1"
    assert small.other is not None and _step_s(small, shape, small.other) == pytest.approx(20.15, rel=0.15)
    sent_once = _megatron("qwen3-30b-a3b", "2x8:H100-SXM", 1024, dispatcher=Dispatcher.PER_NODE)
    assert _step_s(sent_once, shape) == pytest.approx(30.29, rel=0.1)


def test_a_rack_of_small_nodes_is_priced_as_one_large_node_of_as_many_gpus():
    nodes, racks = (_megatron("qwen3-235b-a22b", gpus, 8192, precision="fp8") for gpus in ("64x4:GB300", "4x64:GB300"))
    assert nodes.cluster.domain_of_rank == racks.cluster.node_of_rank
    assert _step_s(nodes, _QWEN_ON_RACKS) == pytest.approx(_step_s(racks, _QWEN_ON_RACKS), rel=1e-9)
    slower = question_of(AdviseOptions(model="qwen3-235b-a22b", gpus="32x8:B300", batch=8192, seq=4096))
    assert len(set(slower.cluster.domain_of_rank)) == 32, "whose nodes no NVLink joins"


def test_exchanges_overlap_in_one_stage_or_interleaved_ones_without_full_recomputation():
    plain, overlapped = (
        _megatron("qwen3-235b-a22b", "64x4:GB300", 8192, precision="fp8", overlap_experts=overlaps)
        for overlaps in (False, True)
    )
    for shape, overlaps in (
        (_QWEN_ON_RACKS, True),
        (_QWEN_ON_RACKS.replace("vpp=12,", ""), False),
        (_QWEN_ON_RACKS + ",recompute=full", False),
        (_QWEN_ON_RACKS + ",recompute=mlp", False),
        ("tp=1,pp=1,ep=32,etp=1,mbs=2,zero=1", True),
        ("tp=1,pp=1,ep=32,etp=1,mbs=32,zero=1", False),
    ):
        assert (_step_s(overlapped, shape) < _step_s(plain, shape)) is overlaps, shape


def test_plans_that_share_experts_have_a_plain_and_a_tuned_time():
    asked = _megatron("qwen3-30b-a3b", "1x8:H100-SXM", 64)
    plan = reading_of("tp=1,pp=1,ep=8,etp=1,mbs=1,zero=1", asked.setting).plan
    plain, tuned = ways_of_experts(asked, plan)
    assert plain.startswith("    plain, experts' rows all to all: ") and "once to each node: " in plain
    assert tuned.startswith("    as tuned (--tuned), with --moe-token-dispatcher-type flex")
    assert float(tuned.split()[-2]) < float(plain.split()[-2])
    assert not list(ways_of_experts(asked, reading_of("tp=1,pp=1,mbs=1,zero=3", asked.setting).plan))
    with pytest.raises(BadInput, match="--tuned: the runtime shardwright has no tuned way to run qwen3-30b-a3b"):
        question_of(AdviseOptions(model="qwen3-30b-a3b", gpus="1x8:H100-SXM", tuned=True))


@pytest.mark.parametrize(
    ("precision", "more", "written", "left_out"),
    [
        pytest.param("bfloat16", "", {_OVERLAP, "--cuda-graph-scope attn moe_router moe_preprocess"}, _FUSED),
        pytest.param("bfloat16", ",recompute=mlp", set(), _OVERLAP),
        pytest.param("bfloat16", ",pp=2", {"--cuda-graph-impl transformer_engine"}, _OVERLAP),
        pytest.param("nvfp4", "", {_OVERLAP, _FUSED, "--cuda-graph-impl full_iteration"}, "--cuda-graph-scope"),
        pytest.param("fp8", "", {_OVERLAP, _FUSED, "--cuda-graph-impl full_iteration"}, "--cuda-graph-scope"),
    ],
)
@pytest.mark.parametrize("system", [System.MEGATRON, System.MEGATRON_BRIDGE])
def test_what_tuned_prices_assume_is_in_the_command(
    system: System, precision: str, more: str, written: set[str], left_out: str
):
    asked = _megatron("qwen3-30b-a3b", "2x4:GB200", 64, precision=precision)
    plan = reading_of("tp=1,ep=4,etp=1,mbs=1,zero=1" + more, asked.setting).plan
    plain, tuned = (_arguments(started(system, plan, each).files, system) for each in (False, True))
    assert "--moe-token-dispatcher-type alltoall" in plain and not plain & written
    assert {"--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep", *written} <= tuned
    assert not any(line.startswith(left_out) for line in tuned)


def _arguments(files: Mapping[str, str], system: System) -> set[str]:
    """The lines of a file, those of a recipe as the arguments that say the same."""
    if system is System.MEGATRON:
        return set(files["args.txt"].splitlines())
    fields = re.findall(r"cfg\.[\w.]*?(\w+) = (.+)", files["recipe.py"])
    fields += re.findall(r"(overlap_moe\w+)=(True)", files["recipe.py"])
    lists = ((name, " ".join(re.findall(r"[\w.]+", value))) for name, value in fields)
    return {f"--{name.replace('_', '-')} {value}".removesuffix(" True") for name, value in lists}


def test_domains_hold_all_nodes_of_a_rack_or_equal_powers_of_two():
    def domains(count: int, per_node: int = 4, joined: int | None = 72) -> tuple[int, ...]:
        node = NodeType(device="d", devices_per_node=per_node, memory_bytes=1, domain_devices=joined or UNSET)
        cluster = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=count),), node_types={"n": node})
        return tuple(cluster.domain_of_rank.count(each) for each in sorted(set(cluster.domain_of_rank)))

    assert domains(18) == (72,) and domains(64) == (64,) * 4 and domains(20) == (16,) * 5
    assert domains(4, 64) == (64,) * 4 and domains(3, 8, None) == (8,) * 3 == domains(3, 8, 8)


@pytest.mark.parametrize(("fused", "itemsize"), [(False, 4), (True, 2)])
def test_biases_of_experts_are_moved_in_float32_unless_one_operator_adds_them(fused, itemsize):
    """28 bytes an element of float32 are written and read in a forward pass, and twice in a backward one."""
    model = _megatron("gpt-oss-120b", "1x8:H100-SXM", 64).model
    key = ExpertKey(type=model.layers[0], experts=16, etp_size=1, recompute=Recompute.NONE, rows=4096)

    def passes(bias_bytes: int) -> tuple[float, float]:
        habits = ExpertHabits(fused=fused, bias_bytes=bias_bytes)
        machine = Machine(1e12, 1e12, Link(1e12, 0.0), experts=habits)
        figures = estimate_experts(model, key, Precision(compute="bfloat16"), machine)
        return figures.forward_s, figures.backward_s

    added = [more - without for more, without in zip(passes(28), passes(0), strict=True)]
    moved_s = 2 * 28 * itemsize / 4 * 4096 * model.boundary[0].features / 1e12
    assert added == pytest.approx([moved_s, 2 * moved_s])


def test_positions_go_to_so_many_places_in_the_mean():
    assert _different(2, 1) == 1.0 and _different(2, 2) == 1.5 and _different(4, 8) == pytest.approx(4 * (1 - 0.75**8))


def test_the_host_starts_local_experts_one_by_one_unless_graphs_or_fusion_spare_them():
    """42 us for each kernel: 2 of each local expert in 16 bits, beside 7 of grouped products and exchanges."""
    host = {
        name: _megatron("qwen3-30b-a3b", "1x8:H100-SXM", 64, **more).profiles.host
        for name, more in {"plain": {}, "graphs": {"graphs": Graphs.PARTIAL}, "full": {"graphs": Graphs.FULL}}.items()
    }
    (block,) = {key.type for key in host["plain"]}
    experts, rest = (
        HostKey(type=block, recompute=Recompute.NONE, experts=16),
        HostKey(type=block, recompute=Recompute.NONE),
    )
    assert host["plain"][experts] == pytest.approx(((7 + 2 * 16) * 42e-6, 2 * (7 + 2 * 16) * 42e-6))
    assert host["graphs"][experts] == pytest.approx(host["plain"][experts]) and host["plain"][rest][0] > 0
    assert host["graphs"][rest] == host["full"][rest] == host["full"][experts] == (0.0, 0.0)
    again = HostKey(type=block, recompute=Recompute.FULL)
    assert host["graphs"][again] == host["plain"][again] and host["full"][again] == (0.0, 0.0)
    fused = _megatron("qwen3-30b-a3b", "1x8:H100-SXM", 64, fused_experts=True).profiles.host
    assert fused[experts] == (0.0, 0.0) and fused[rest] == host["plain"][rest]
