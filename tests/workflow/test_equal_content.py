"""What Snakemake reruns below a result that is written again, as docs/design/workflow.md says."""

import subprocess
import sys
from pathlib import Path

import pytest

SNAKEFILE = """
from hashlib import sha256
from pathlib import Path

def content_hash(_wildcards):
    return sha256(Path(checkpoints.hashed.get().output[0]).read_bytes()).hexdigest()

rule all:
    input: "plain.out", "dated.out", "ancient.out", "hashed.out"
rule plain:
    output: "plain.in"
    shell: "echo CONTENT > {output}"
rule dated:
    output: "dated.in"
    shell: "echo CONTENT > {output}; touch -d 2020-01-01 {output}"
rule old:
    output: "ancient.in"
    shell: "echo CONTENT > {output}"
checkpoint hashed:
    output: "hashed.in"
    shell: "echo CONTENT > {output}"
rule below_plain:
    input: "plain.in"
    output: "plain.out"
    shell: "cp {input} {output}; echo plain >> ran"
rule below_dated:
    input: "dated.in"
    output: "dated.out"
    shell: "cp {input} {output}; echo dated >> ran"
rule below_ancient:
    input: ancient("ancient.in")
    output: "ancient.out"
    shell: "cp {input} {output}; echo ancient >> ran"
rule below_hashed:
    input: ancient("hashed.in")
    params: content_hash
    output: "hashed.out"
    shell: "cp {input} {output}; echo hashed >> ran"
"""
FORCED = "-R", "plain", "dated", "old", "hashed"


@pytest.fixture
def call(tmp_path):
    """Run the rules with a content, and return which of the lower ones ran and what was said."""

    def snakemake(content, *options):
        (tmp_path / "Snakefile").write_text(SNAKEFILE.replace("CONTENT", content))
        (tmp_path / "ran").write_text("")
        command = Path(sys.executable).parent / "snakemake", "--cores", "1", *options
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return {*(tmp_path / "ran").read_text().split()}, done.stdout

    return snakemake


@pytest.mark.long
def test_only_a_checkpoint_with_the_hash_of_its_content_reruns_what_must_and_no_more(call):
    assert call("equal")[0] == {"plain", "dated", "ancient", "hashed"}
    assert call("equal", *FORCED)[0] == {"plain", "dated"}
    assert call("equal")[0] == set()
    dry = call("other", "-n")[1]
    assert "below_plain" in dry and "below_hashed" not in dry
    assert call("other")[0] == {"plain", "dated", "hashed"}
