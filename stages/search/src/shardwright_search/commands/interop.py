"""`shardwright-search import` and `export`: plans from and for other systems."""

from shardwright_formats.command import show
from shardwright_formats.io.json import atomic_path, read_document, write_bytes, write_document
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Plan
from shardwright_search.interop.galvatron import galvatron_file, plan_of_galvatron
from shardwright_search.interop.galvatron_file import read_galvatron
from shardwright_search.interop.megatron import megatron_arguments
from shardwright_search.interop.torchtitan import torchtitan_toml
from shardwright_search.options import ExportOptions, ImportGalvatronOptions, System

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
    """Write another system's file, and show what that file cannot hold."""
    exported = _EXPORTERS[options.to](read_document(options.plan, Plan), options.plan)
    with atomic_path(options.out) as path:
        write_bytes(path, exported.text.encode())
        show("\n".join(exported.notes))
