"""Scripts that start Megatron-LM: each node's torchrun is told its place in the plan's order, and the layout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_calls import call
from launch_stand_ins import ARGUMENTS, LAYOUT, mixed_plan, said, stand_ins, started
from launchers import free_port
from made_up import make_cluster, make_mixed_cluster
from megatron_parser import parser
from msgspec.structs import replace

from shardwright.io import write_document
from shardwright.types import Cluster, PipelineStage, Plan
from shardwright_search.cli import APP
from shardwright_search.systems.launch import in_pipeline_order

HOSTS = "# of ours\nbig1 A100\n\nsmall1\tA10\n  big2   A100\nsmall2 A10\n"
SCRIPTS = {"node.sh", "docker.sh", "slurm.sh", "slurm_enroot.sh"}
PLACES = {"jobset.yaml", "trainjob.yaml", "skypilot.yaml"}
"""Checked in test_search_interop_places.py."""
PORT = "29500"


def written(folder: Path, plan: Plan, *options: object, hosts: str | None = None) -> Path:
    """A new folder of scripts for a plan; its name has a space."""
    write_document(folder / "plan.json", plan)
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
        options = (*options, "--hosts", folder / "hosts")
    out = folder / f"to start {len(list(folder.glob('to start *')))}"
    ended = call(
        APP, "export", folder / "plan.json", "--to", "megatron", "--out", folder / "args", "--launch", out, *options
    )
    assert ended.exit_code == 0, ended.output
    assert {path.name for path in out.iterdir()} - PLACES == {*SCRIPTS, "nodes.txt"}
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", out / script], check=True)
        assert os.access(out / script, os.X_OK)
    return out


def refused(folder: Path, plan: Plan, *options: object) -> str:
    """The line with which scripts for a plan are refused; nothing is written."""
    write_document(folder / "plan.json", plan)
    before = sorted(folder.iterdir())
    given = ("--to", "megatron", "--launch", folder / "scripts", *options)
    ended = call(APP, "export", folder / "plan.json", "--out", folder / "args", *given)
    assert (ended.exit_code, ended.stdout) == (2, "") and sorted(folder.iterdir()) == before
    (line,) = ended.stderr.splitlines()
    return line


def check_order(told: dict[int, list[str]], names: list[str], master: str) -> None:
    """Nodes are started in the pipeline's order, each with its own number of ranks and all with the same arguments."""
    assert [line[0] for line in told.values()] == names
    for node, (_, connections, *arguments) in told.items():
        launcher, script, own = arguments[:10], arguments[10], arguments[11:]
        options = dict(zip(launcher[::2], launcher[1::2], strict=True))
        each = "4" if node < 2 else "8"
        assert options == {
            "--nnodes": "4", "--node_rank": str(node), "--nproc_per_node": each,
            "--master_addr": master, "--master_port": PORT,
        }  # fmt: skip
        assert (script, connections) == ("/opt/Megatron LM/pretrain_gpt.py", "1")
        assert tuple(own[-len(ARGUMENTS) :]) == ARGUMENTS
        given = parser().parse_args(own[: -len(ARGUMENTS)])
        assert (given.pipeline_model_parallel_layout, given.pipeline_model_parallel_size) == (LAYOUT, 6)
        assert (given.tensor_model_parallel_size, given.num_layers, given.bf16) == (2, 14, True)


def test_nodes_are_listed_in_the_order_of_the_pipeline(tmp_path):
    lines = (written(tmp_path, mixed_plan(), hosts=HOSTS) / "nodes.txt").read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == ["small1 A10", "small2 A10", "big1 A100", "big2 A100"]
    assert "# node 0: ranks 0 to 3, pipeline stage 0" in lines
    assert "# node 3: ranks 16 to 23, pipeline stages 4 to 5" in lines
    # The list is itself a file of hosts.
    again = written(tmp_path, mixed_plan(), hosts="\n".join(lines)) / "nodes.txt"
    assert again.read_text().splitlines() == lines


def test_what_the_scripts_hold_is_what_the_export_says(tmp_path):
    folder = written(tmp_path, mixed_plan(device_order=("A10", "A100")))
    node = (folder / "node.sh").read_text()
    listed = re.search(r"^arguments=\(\n(.*?)^\)$", node, re.DOTALL | re.MULTILINE)[1]
    assert [line.strip() for line in listed.splitlines()] == (tmp_path / "args").read_text().splitlines()
    call(APP, "export", tmp_path / "plan.json", "--to", "megatron", "--out", tmp_path / "alone")
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "args").read_bytes()


@pytest.mark.parametrize("given", [True, False])
def test_node_by_node_each_is_told_its_place(tmp_path, given):
    folder, programs = written(tmp_path, mixed_plan(), hosts=HOSTS if given else None), stand_ins(tmp_path)
    if not given:  # the user writes them, instead
        text = (folder / "nodes.txt").read_text()
        for i, host in enumerate(("small1", "small2", "big1", "big2")):
            text = text.replace(f"<host-{i}>", host)
        (folder / "nodes.txt").write_text(text)
    for name in ("big2", "small2.example.org", "small1", "big1"):
        ended = started(folder / "node.sh", programs | {"NODE_NAME": name}, *ARGUMENTS)
        assert ended.returncode == 0, ended.stderr
    check_order(said(programs), ["small1", "small2.example.org", "big1", "big2"], "small1")
    for node in range(4):
        started(folder / "node.sh", programs | {"NODE_RANK": str(node), "MASTER_ADDR": "10.0.0.7"}, *ARGUMENTS)
    check_order(said(programs), [""] * 4, "10.0.0.7")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("script", ["slurm.sh", "slurm_enroot.sh"])
def test_slurm_starts_a_component_for_each_run_of_nodes_of_a_type(tmp_path, script, given):
    folder, programs = written(tmp_path, mixed_plan("my $(plan)"), hosts=HOSTS if given else None), stand_ins(tmp_path)
    asked = [line for line in (folder / script).read_text().splitlines() if line.startswith("#SBATCH")]
    shared = ["--nodes=2", "--ntasks-per-node=1"]
    small = [*shared, "--gpus-per-node=4", "--exclusive", "--mem=0"]
    big = [*shared, "--gpus-per-node=8", "--exclusive", "--mem=0"]
    where = ("--nodelist=small1,small2", "--nodelist=big1,big2") if given else ("--constraint=A10", "--constraint=A100")
    expected = ["--job-name=my-plan-", *small, where[0], "hetjob", *big, where[1]]
    assert asked == [f"#SBATCH {option}" for option in expected]

    slurm = {
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "small1,small2", "IMAGE": "team#megatron:25",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "small1,small2", "SLURM_JOB_NODELIST_HET_GROUP_1": "big1,big2",
        "MOUNTS": "/data:/data",
    }  # fmt: skip
    # Slurm runs a copy that lies elsewhere.
    shutil.copy(folder / script, tmp_path / "slurm_script")
    ended = started(tmp_path / "slurm_script", programs | slurm, *ARGUMENTS)
    assert ended.returncode == 0, ended.stderr
    check_order(said(programs), ["small1", "small2", "big1", "big2"], "small1")
    options = Path(f"{programs['SAID']}.srun").read_text().splitlines()
    container = ["--container-image=team#megatron:25", f"--container-mounts={folder}:{folder},/data:/data"]
    assert options == [
        "--het-group=0-1", "--cpu-bind=none", "--kill-on-bad-exit=1", *(container if "enroot" in script else []),
    ]  # fmt: skip


def test_nodes_of_one_type_are_one_job(tmp_path, planned):
    plan = replace(planned(), cluster=make_cluster(8, 2, device="H100"))
    folder, programs = written(tmp_path, plan), stand_ins(tmp_path)
    text = (folder / "slurm.sh").read_text()
    assert not re.search("het|constraint|nodelist=", text, re.IGNORECASE) and "#SBATCH --nodes=2\n" in text
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n7,n3"}
    assert started(folder / "slurm.sh", programs | slurm).returncode == 0
    told = said(programs)
    assert [line[0] for line in told.values()] == ["n7", "n3"]
    assert all("--nproc_per_node 4 --master_addr n7" in " ".join(line) for line in told.values())


def test_a_single_node_needs_no_host(tmp_path, planned):
    plan = replace(planned(tp_size=1), cluster=make_cluster(8, device="H100"))
    folder, programs = written(tmp_path, plan), stand_ins(tmp_path)
    assert started(folder / "node.sh", programs).returncode == 0
    (line,) = said(programs).values()
    assert "--nnodes 1 --node_rank 0 --nproc_per_node 8 --master_addr localhost" in " ".join(line)
    assert line[1] == "unset"


def test_docker_starts_the_same_in_a_container(tmp_path):
    folder, programs = written(tmp_path, mixed_plan(), hosts=HOSTS), stand_ins(tmp_path)
    image = {"IMAGE": "megatron:25", "MOUNTS": "/data:/data,/my code:/code", "NCCL_SOCKET_IFNAME": "ib0"}
    for name in ("small1", "small2", "big1", "big2"):
        ended = started(folder / "docker.sh", programs | image | {"NODE_NAME": name}, *ARGUMENTS)
        assert ended.returncode == 0, ended.stderr
    check_order(said(programs), ["small1", "small2", "big1", "big2"], "small1")
    told = Path(f"{programs['SAID']}.docker").read_text().splitlines()
    before = told[: told.index("megatron:25")]
    assert before[:8] == ["run", "--rm", "--gpus", "all", "--network", "host", "--ipc", "host"]
    mounts = [before[i + 1] for i, word in enumerate(before) if word == "--volume"]
    assert mounts == [f"{folder}:{folder}:ro", "/data:/data", "/my code:/code"]
    assert "NCCL_SOCKET_IFNAME" in before
    assert told[len(before) + 1 :] == ["bash", f"{folder}/node.sh", *ARGUMENTS]


@pytest.mark.parametrize(
    ("script", "changes", "says"),
    [
        ("node.sh", {"PRETRAIN": ""}, "PRETRAIN: is not set"),
        ("node.sh", {"NODE_NAME": "stranger"}, "nodes.txt: stranger is none of its hosts"),
        ("node.sh", {"NODE_RANK": "4"}, "NODE_RANK: 4: number the nodes from 0 to 3"),
        ("node.sh", {"NODE_RANK": "a[$(exit 7)]"}, "NODE_RANK: a"),
        ("node.sh", {"NODE_RANK": "0"}, "<host-0> is no host"),
        ("node.sh", {"NODE_RANK": "0", "NODES": "a b c"}, "3 hosts: the plan is for 4 nodes"),
        ("docker.sh", {}, "IMAGE: is not set"),
        ("slurm_enroot.sh", {"SLURM_SUBMIT_DIR": "{0}", "SLURM_JOB_NODELIST_HET_GROUP_0": "a,b",
                             "SLURM_JOB_NODELIST_HET_GROUP_1": "c,d"}, "IMAGE: is not set"),
        ("slurm.sh", {}, "SLURM_SUBMIT_DIR: is not set"),
        ("slurm.sh", {"SLURM_SUBMIT_DIR": "/"}, "there is no node.sh"),
    ],
)  # fmt: skip
def test_a_script_that_lacks_something_says_what(tmp_path, script, changes, says):
    folder, programs = written(tmp_path, mixed_plan()), stand_ins(tmp_path)
    given = {name: value.format(folder) if name.startswith("SLURM") else value for name, value in changes.items()}
    ended = started(folder / script, programs | given)
    assert ended.returncode != 0 and says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not Path(programs["SAID"]).exists()


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("a A100\nb A100\nc A10", "1 hosts of type A10, the plan's cluster has 2 such nodes: name each node"),
        ("a A100\nb A100\nc A10\nd A10\ne A10", "3 hosts of type A10"),
        ("a A100\nb H100\nc A10\nd A10", "line 2: the plan's cluster has no node type 'H100', only A10, A100: give"),
        ("a A100\na A100\nc A10\nd A10", "line 2: host a is listed twice"),
        ("a A100\n-oProxyCommand=x A100", "line 2: '-oProxyCommand=x' is not a host name"),
        ("a;b A100", "line 1: 'a;b' is not a host name"),
        ("a", "line 1: the plan's cluster has no node type ''"),
        ("", "0 hosts of type A100"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_hosts_that_are_not_the_clusters_are_refused(tmp_path, hosts, says):
    (tmp_path / "hosts").write_bytes(hosts if isinstance(hosts, bytes) else hosts.encode())
    line = refused(tmp_path, mixed_plan(), "--hosts", tmp_path / "hosts")
    assert line.startswith(f"error: {tmp_path}/hosts: {says}")


def by_stages(plan: Plan, *starts: int) -> Plan:
    """The plan with its stages of four ranks at other ranks."""
    stages = (
        PipelineStage(ranks=tuple(range(start, start + 4)), layers=stage.layers)
        for start, stage in zip(starts, plan.stages, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def test_what_no_order_of_nodes_can_say_is_refused(tmp_path):
    plan = mixed_plan()
    line = refused(tmp_path, by_stages(plan, 0, 16, 4, 20, 8, 12))  # node 0, node 2, and node 0 again
    assert "torchrun cannot number the ranks of node 2 in the order of the pipeline stages" in line
    line = refused(tmp_path, by_stages(plan, 4, 0, 16, 20, 8, 12))
    assert "torchrun cannot number the ranks of node 0" in line
    apart = by_stages(plan, 8, 12, 16, 0, 4, 20)  # A100, A10, A100, A10: whole nodes
    assert [group.count for group in in_pipeline_order(apart, "plan.json").cluster.nodes] == [1, 1, 1, 1]


def test_what_megatron_or_a_script_cannot_say_is_refused(tmp_path, planned):
    assert "node type n has no GPU, which these scripts ask for" in refused(tmp_path, planned())
    wide = mixed_plan()
    stages = (replace(wide.stages[0], ranks=tuple(range(16, 24))), *wide.stages[2:])
    lows = ((0, 3), (3, 6), (6, 9), (9, 12), (12, 14))
    layers = tuple(replace(layer, dp_size=4 if i < 3 else 2) for i, layer in enumerate(wide.layers))
    stages = tuple(replace(stage, layers=(cut,)) for stage, cut in zip(stages, lows, strict=True))
    unequal = replace(wide, stages=stages, layers=layers, embedding=replace(wide.embedding, dp_size=4))
    assert "Megatron-LM cannot express stages[1]: 4 ranks, stages[0] has 8" in refused(tmp_path, unequal)
    types = make_mixed_cluster(A100=(2, 8, 1 << 34), A10=(2, 4, 1 << 34)).node_types
    nodes = [replace(group, node_type=f"my {group.node_type}") for group in wide.cluster.nodes]
    renamed = Cluster(name="c", nodes=tuple(nodes), node_types={f"my {name}": own for name, own in types.items()})
    line = refused(tmp_path, replace(wide, cluster=renamed))
    assert line.endswith("node type 'my A10' is not the name of a feature in Slurm: pass --hosts")
    hosts = HOSTS.replace("A1", "my A1")
    assert (
        "small1 my A10\n" in (written(tmp_path, replace(wide, cluster=renamed), hosts=hosts) / "nodes.txt").read_text()
    )


@pytest.mark.parametrize(
    ("place", "says"),
    [("plan.json", "plan.json/nodes.txt: "), ("taken", "taken: is not empty: choose a new folder, or remove what")],
)
def test_a_folder_that_cannot_hold_the_scripts_is_refused(tmp_path, place, says):
    (tmp_path / "taken/node.sh").mkdir(parents=True)
    assert says in refused(tmp_path, mixed_plan(), "--launch", tmp_path / place)
    assert list((tmp_path / "taken").iterdir()) == [tmp_path / "taken/node.sh"]


def test_hosts_that_the_user_wrote_in_a_folder_are_kept(tmp_path):
    nodes = written(tmp_path, mixed_plan()) / "nodes.txt"
    nodes.write_text(nodes.read_text().replace("<host-0>", "mine"))
    before = nodes.read_bytes()
    assert refused(tmp_path, mixed_plan(), "--launch", nodes.parent).startswith(
        f"error: {nodes.parent}: is not empty: "
    )
    assert nodes.read_bytes() == before


def test_no_file_is_written_over_another(tmp_path):
    line = refused(tmp_path, mixed_plan(), "--out", tmp_path / "scripts/node.sh")
    assert line == f"error: {tmp_path}/scripts/node.sh: is a file of --launch too: choose another name"


def test_scripts_that_there_is_no_room_for_leave_no_folder(tmp_path):
    write_document(tmp_path / "plan.json", mixed_plan())
    program = Path(sys.executable).with_name("shardwright-search")
    line = f"ulimit -f 1; {program} export plan.json --to megatron --out new/args --launch scripts"
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("error: scripts/node.sh: File too large: ")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_hosts_without_scripts_are_refused(tmp_path):
    write_document(tmp_path / "plan.json", mixed_plan())
    given = ("--to", "megatron", "--out", tmp_path / "args", "--hosts", tmp_path / "hosts")
    ended = call(APP, "export", tmp_path / "plan.json", *given)
    assert (ended.exit_code, ended.stderr) == (2, "error: --hosts: names the hosts of scripts: pass --launch too\n")


@pytest.mark.skipif(shutil.which("torchrun", path=Path(sys.executable).parent) is None, reason="torchrun is absent")
def test_torchrun_itself_numbers_ranks_of_unequal_nodes_in_the_order_of_the_list(tmp_path, planned):
    cluster = make_mixed_cluster(A100=(1, 2, 1 << 34), A10=(1, 1, 1 << 34))
    plan = planned(layers=9, devices=3, tp_size=1, pp_size=3)
    ranks = [(2,), (0,), (1,)]  # A10 first
    stages = tuple(replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True))
    folder = written(tmp_path, replace(plan, cluster=cluster, stages=stages), hosts="large A100\nsmall A10")
    train = tmp_path / "train it.py"
    train.write_text(
        "import os, sys\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_NAME'\n"
        "words = [os.environ[name] for name in names] + sys.argv[-1:]\n"
        f"open(f'{tmp_path}/rank' + words[0], 'w').write(' '.join(words))\n"
    )
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PRETRAIN": str(train),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }  # fmt: skip
    nodes = [
        subprocess.Popen(["bash", folder / "node.sh", "--last"], env=environment | {"NODE_NAME": name})
        for name in ("large", "small")
    ]
    assert [node.wait(120) for node in nodes] == [0, 0]
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert found == ["0 3 0 small --last", "1 3 0 large --last", "2 3 1 large --last"]
