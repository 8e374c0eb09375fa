"""`shardwright-search import` and `export`: plans from and for other systems."""

from contextlib import ExitStack
from os.path import realpath

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, atomic_path, read_document, sync_path, write_document
from shardwright_formats.types import Cluster, Model, Plan
from shardwright_search.interop.galvatron import galvatron_file, plan_of_galvatron
from shardwright_search.interop.galvatron_file import read_galvatron
from shardwright_search.interop.launch import Launch, launch_of
from shardwright_search.interop.megatron import megatron_arguments
from shardwright_search.interop.node_order import in_pipeline_order, nodes_of, read_hosts
from shardwright_search.interop.target import Exported
from shardwright_search.interop.torchtitan import torchtitan_toml
from shardwright_search.options import ExportOptions, ImportGalvatronOptions, System

_EXECUTABLE = 0o755
_EXPORTERS = {
    System.GALVATRON: galvatron_file,
    System.MEGATRON: megatron_arguments,
    System.TORCHTITAN: torchtitan_toml,
}


def import_galvatron(options: ImportGalvatronOptions) -> None:
    """Write the plan that Galvatron would run."""
    given = read_galvatron(options.config)
    model, cluster = read_document(options.model, Model), read_document(options.cluster, Cluster)
    name = options.name or options.out.stem
    write_document(options.out, plan_of_galvatron(name, given, model, cluster, options, options.config))


def export_plan(options: ExportOptions) -> None:
    """Write another system's file and, if asked, the scripts that start it; show what these cannot hold."""
    plan = read_document(options.plan, Plan)
    if options.launch is None:
        if options.hosts is not None:
            raise BadInput("--hosts", "names the hosts of scripts", "pass --launch too")
        exported, launch = _EXPORTERS[options.to](plan, options.plan), Launch({}, ())
    else:
        exported, launch = _launch(options, plan)
    files = {options.launch / name: text for name, text in launch.files.items()} if options.launch else {}
    if realpath(options.out) in map(realpath, files):
        raise BadInput(options.out, "is a file of --launch too", "choose another name")
    with ExitStack() as stack:  # Each file is complete before the first gets its name.
        for path, text in {**files, options.out: exported.text}.items():
            temporary = stack.enter_context(atomic_path(path))
            temporary.write_bytes(text.encode())
            sync_path(temporary)
            if path.suffix == ".sh" and path in files:
                temporary.chmod(_EXECUTABLE)
        show("\n".join((*exported.notes, *launch.notes)))


def _launch(options: ExportOptions, plan: Plan) -> tuple[Exported, Launch]:
    """What is exported of a plan whose ranks are numbered as its pipeline takes up nodes, and the scripts for it."""
    if options.to is not System.MEGATRON:
        raise BadInput("--launch", f"there are no scripts for {options.to}", "leave it out, or pass --to megatron")
    ordered = in_pipeline_order(plan, options.plan)
    exported = megatron_arguments(ordered, options.plan)
    hosts = None if options.hosts is None else read_hosts(options.hosts, ordered.cluster)
    return exported, launch_of(ordered, exported, nodes_of(ordered.cluster, hosts), options.plan)
