"""Where nodes meet: by options, or by the variables that srun sets."""

from pathlib import Path

import pytest

from shardwright.io import BadInput
from shardwright.launch.nodes import Address, NodeOptions, Nodes, check_all_nodes, nodes_of
from shardwright.types import Cluster, NodeGroup, NodeType

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Slurm's command, which knows two hosts and an address of the first."""
    file = tmp_path / "scontrol"
    file.write_text(
        """#!/bin/sh
        case "$*" in
        "--oneliner show hostnames gpu[3-4]") printf "gpu3\\ngpu4\\n" ;;
        "--oneliner show node gpu3") echo "NodeName=gpu3 NodeAddr=10.0.0.3 NodeHostName=gpu3" ;;
        "--oneliner show hostnames gpu5") echo gpu5 ;;
        "--oneliner show hostnames gpu3") echo gpu3 ;;
        "--oneliner show hostnames gpu4") echo gpu4 ;;
        "--oneliner show node gpu4") echo "NodeName=gpu4 NodeAddr=10.0.0.4 NodeHostName=gpu4" ;;
        "--oneliner show node gpu5") echo "NodeName=gpu5 State=DOWN" ;;
        *) exit 1 ;;
        esac
        """
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return file


def test_a_step_of_srun_says_all() -> None:
    nodes = nodes_of(None, None, None, STEP)
    assert nodes == Nodes(2, 1, "10.0.0.3", step="1234567.0")
    assert nodes.address == Address("10.0.0.3", 0)


def test_options_win_over_the_step_and_hold_without_one() -> None:
    assert nodes_of(None, 0, "here:7", STEP) == Nodes(2, 0, "here:7")
    assert nodes_of(1, 0, None, STEP) == Nodes(1, 0)
    assert nodes_of(3, 2, "here:7", {}) == Nodes(3, 2, "here:7")
    assert nodes_of(None, None, None, {}) == Nodes()


def test_a_batch_script_outside_srun_is_one_node() -> None:
    batch = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}
    assert nodes_of(None, None, None, batch) == Nodes()


def test_the_step_counts_and_not_the_job_around_it() -> None:
    assert nodes_of(None, 0, None, STEP | {"SLURM_STEP_NUM_NODES": "1"}) == Nodes(1, 0)


def test_nodes_of_a_heterogeneous_job_meet_at_the_first_of_its_first_component() -> None:
    """The list of the step's nodes is sorted by name, whatever their ranks are."""
    components = {"SLURM_JOB_NODELIST_HET_GROUP_0": "gpu4", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu3"}
    assert nodes_of(None, None, None, STEP | components).rendezvous == "10.0.0.4"
    without_the_first = components | {"SLURM_JOB_NODELIST_HET_GROUP_0": "gpu5"}
    assert nodes_of(None, None, None, STEP | without_the_first).rendezvous == "10.0.0.3"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[3-"}, r"scontrol does not resolve 'gpu\[3-' \(\): pass --rendezvous"),
        ({"SLURM_STEP_NODELIST": "gpu5"}, r"'gpu5' \(it reports no NodeAddr of gpu5\): pass --rendezvous"),
        ({"SLURM_LOCALID": "1"}, "srun: it started several tasks on one node: pass --ntasks-per-node=1"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID: is 'x', not a number"),
        ({"SLURM_NNODES": ""}, "SLURM_NNODES: is '', not a number"),
    ],
)
def test_a_step_that_does_not_say_enough_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        nodes_of(None, None, None, STEP | changed)


def test_a_node_without_scontrol_is_told_to_name_the_rendezvous(scontrol: Path) -> None:
    scontrol.unlink()
    with pytest.raises(BadInput, match="pass --rendezvous"):
        nodes_of(None, None, None, STEP)


@pytest.mark.parametrize(
    ("rendezvous", "address"),
    [("h:1", Address("h", 1)), ("10.0.0.1:65535", Address("10.0.0.1", 65535)), ("[::1]:29500", Address("::1", 29500))],
)
def test_a_rendezvous_is_a_host_and_a_port(rendezvous: str, address: Address) -> None:
    assert Nodes(2, 0, rendezvous).address == address


@pytest.mark.parametrize(
    "rendezvous", ["", "h", "h:", ":1", "h:0", "h:65536", "h:99999999", "h:-1", "h:1x", "::1:5", "a b:1"]
)
def test_what_is_no_host_and_port_is_one_line(rendezvous: str) -> None:
    with pytest.raises(BadInput, match=r"--rendezvous: .* is not HOST:PORT: give a port of 1 to 65535"):
        Nodes(2, 0, rendezvous)


def test_several_nodes_need_a_place_to_meet_and_a_number_each() -> None:
    with pytest.raises(BadInput, match="--rendezvous: 2 nodes need a place to meet"):
        Nodes(2, 0)
    with pytest.raises(BadInput, match="--node-rank: 2 is not below --nnodes 2"):
        Nodes(2, 2, "h:1")


def test_one_machine_stands_for_all_nodes_where_it_is_told_to() -> None:
    types = {
        name: NodeType(device="cpu", devices_per_node=count, memory_bytes=1) for name, count in (("a", 1), ("b", 2))
    }
    groups = (NodeGroup(node_type="b", count=2), NodeGroup(node_type="a", count=1))
    cluster = Cluster(name="five", nodes=groups, node_types=types)
    each = [Nodes(3, rank, "here:7").ranks_here(cluster) for rank in range(3)]
    assert each == [range(2), range(2, 4), range(4, 5)]
    here = NodeOptions(all_nodes_here=True).nodes({})
    assert here.ranks_here(cluster) == range(5)
    check_all_nodes(cluster, here, "plan.json")
    with pytest.raises(BadInput, match="is for 3 nodes, --nnodes is 1"):
        check_all_nodes(cluster, Nodes(), "plan.json")
    with pytest.raises(BadInput, match="--all-nodes-here: --nnodes is 3: give one of the two"):
        NodeOptions(all_nodes_here=True, nnodes=3).nodes({})
    with pytest.raises(BadInput, match="--node-rank: 1 is not below --nnodes 1"):
        NodeOptions(all_nodes_here=True, node_rank=1).nodes({})
