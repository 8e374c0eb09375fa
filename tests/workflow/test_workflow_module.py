"""The workflow as others use it: by workflow/Snakefile, and as a module with a prefix, from another folder."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
MODULE = """
configfile: "mine.yaml"


module shardwright:
    snakefile:
        "ROOT/workflow/Snakefile"
    config:
        config
    prefix:
        "planned"


use rule * from shardwright as sw_*


rule mine:
    default_target: True
    input:
        rules.sw_all.input,
        rules.sw_grid.output,
    output:
        "mine.txt",
    shell:
        "ls {input} > {output}"
"""


def test_the_snakefile_of_the_workflow_folder_has_the_default_target(bare):
    bare.configure()
    by_file = bare.snakemake("-n", root=ROOT / "workflow")
    assert by_file.jobs == bare.snakemake("-n").jobs and by_file.jobs["run"] == 2


def test_the_workflow_is_a_module_with_a_prefix_in_a_folder_of_another(stubs):
    """Its grids may stand beside the configuration, and so may its texts; nothing is written outside the prefix."""
    (stubs.folder / "corpus").mkdir()
    (stubs.folder / "corpus/text.txt").write_text("some words")
    (stubs.folder / "Snakefile").write_text(MODULE.replace("ROOT", str(ROOT)))

    def change(config):
        config["data"]["stdlib"].update(text="corpus")
        config["runs"]["demo"].update(export=True)

    stubs.configure(change)
    (stubs.folder / "config.yaml").rename(stubs.folder / "mine.yaml")
    grids = stubs.folder / "grids"
    grids.mkdir()
    laptop = yaml.safe_load((ROOT / "config/grids/laptop.yaml").read_text())
    (grids / "mine.yaml").write_text(yaml.safe_dump(laptop))
    done = stubs.snakemake(root=stubs.folder, configfile=None)
    assert done.status == 0, done.output
    made = (stubs.folder / "mine.txt").read_text().split()
    assert "planned/results/report.html" in made and "planned/results/grid.csv" in made
    assert not (stubs.folder / "results").exists()
    for words in stubs.calls():
        paths = [word for word in words if "results/" in word]
        assert all(word.startswith("planned/results/") for word in paths), words
    again = stubs.snakemake("-n", root=stubs.folder, configfile=None)
    assert "Nothing to be done" in again.output
    grid = stubs.snakemake("-n", "-p", "planned/results/grids/mine.md", root=stubs.folder, configfile=None)
    commands = [line for line in grid.output.splitlines() if "shardwright " in line]
    assert commands and not any(word.startswith("results/") for line in commands for word in line.split())


def test_files_of_the_configuration_are_looked_for_beside_it(stubs):
    (stubs.folder / "there").mkdir()
    (stubs.folder / "there/corpus").mkdir()
    (stubs.folder / "there/llama").mkdir()

    def change(config):
        config["data"]["stdlib"].update(text="corpus")
        config["runs"]["demo"].update(weights="llama", export=True)

    stubs.configure(change)
    (stubs.folder / "config.yaml").rename(stubs.folder / "there/config.yaml")
    called = stubs.snakemake("-n", "-p", "runs", configfile="there/config.yaml")
    for words in ("prepare --text there/corpus", "--weights there/llama", "--copy-from there/llama"):
        assert words in called.output
