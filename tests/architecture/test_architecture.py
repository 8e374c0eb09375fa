"""The house keeps its shape: rooms, sizes, imports, names, and a README that tells the truth about the Makefile."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardwright.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "shardwright-core": ROOT / "core",
    "shardwright-profile": ROOT / "stages" / "profile",
    "shardwright-search": ROOT / "stages" / "search",
    "shardwright-train": ROOT / "stages" / "train",
}
MODULES = {package: package.replace("-", "_").removesuffix("_core") for package in PACKAGES}
# What a name of an import is called where it is installed from, when these differ.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
LONGEST = 700


def _tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, text=True, capture_output=True, check=True)
    return [ROOT / path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def _project(package):
    return tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["project"]


def _sources(package):
    return sorted((PACKAGES[package] / "src").rglob("*.py"))


def _imported(path):
    """The outermost names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_no_folder_shadows_a_module_of_the_standard_library():
    assert not (ROOT / "stages" / "__init__.py").exists()
    assert not list((ROOT / "stages").glob("*/__init__.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_is_too_long_to_be_read_at_once():
    files = _tracked("*.py", "*.smk", "*Snakefile")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_no_two_test_files_share_a_name():
    names = [path.name for path in _tracked("tests/**/test_*.py", "tests/test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_nothing_is_unpickled():
    """Neither what a peer sends nor what a file holds."""
    unpickles = re.compile(r"(?:gather|scatter|broadcast|send|recv)_object|(?:\b|allow_)pickle\b|torch\.load\(")
    sources = (path for package in PACKAGES for path in _sources(package))
    assert [str(path.relative_to(ROOT)) for path in sources if unpickles.search(path.read_text(encoding="utf-8"))] == []


def _private_names_of_others(path):
    """What a file imports from modules of the product by a name with an underscore, which are their own."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    ours = (node for node in nodes if re.match(r"shardwright[._]", node.module or ""))
    return {alias.name for node in ours for alias in node.names if alias.name.startswith("_")}


def test_no_module_of_the_product_imports_another_ones_private_names():
    files = [
        *_tracked(
            "core/src/**/*.py",
            "stages/*/src/**/*.py",
            "workflow/**/*.py",
        )
    ]
    assert len(files) > 200
    assert {str(path.relative_to(ROOT)): odd for path in files if (odd := _private_names_of_others(path))} == {}


def test_core_imports_only_the_standard_library_msgspec_numpy_and_h5py():
    allowed = set(sys.stdlib_module_names) | {"msgspec", "numpy", "h5py", "shardwright"}
    files = [path for path in _sources("shardwright-core") if path.name != "backend.py"]  # for ranks, which have torch
    found = {path.name: odd for path in files if (odd := _imported(path) - allowed)}
    assert found == {}


def test_the_front_door_alone_reads_command_lines():
    commands = {path for package in PACKAGES for path in _sources(package)} - {
        ROOT / "core/src/shardwright/schema/generate.py",
    }
    readers = [path.name for path in sorted(commands) if "argparse" in _imported(path)]
    assert readers == ["command_line.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_needs(package):
    project = _project(package)
    extras = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
    named = {canonicalize_name(Requirement(need).name) for need in [*project["dependencies"], *extras]}
    named_as = {"shardwright": "shardwright-core", **DISTRIBUTIONS}
    found = {name for path in _sources(package) for name in _imported(path)}
    needed = found - set(sys.stdlib_module_names) - {MODULES[package]}
    assert {canonicalize_name(named_as.get(name, name)) for name in needed} <= named


def _needs(project, *extras):
    """The needs of a project by name, with those of some of its extras."""
    optional = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(need for extra in extras for need in optional[extra])]
    return {(need := Requirement(line)).name: need.specifier for line in lines}


def test_the_whole_distribution_has_the_commands_and_needs_of_its_parts():
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = {package: _project(package) for package in PACKAGES}
    assert whole["scripts"] == {name: to for part in parts.values() for name, to in part["scripts"].items()}
    registered = [part.get("entry-points", {}).get("shardwright.commands", {}) for part in parts.values()]
    assert whole["entry-points"]["shardwright.commands"] == {k: v for part in registered for k, v in part.items()}
    planner, training = _needs(whole), _needs(whole, "profile", "train")
    for package, part in parts.items():
        needs = _needs(part, *(["hardware"] if package == "shardwright-profile" else []))
        have = training if package in ("shardwright-profile", "shardwright-train") else planner
        # The floors of its parts, or higher ones.
        missing = {name for name in needs if name != "shardwright-core" and name not in have}
        assert not missing, (package, missing)
    optional = parts["shardwright-train"]["optional-dependencies"]
    assert {name: whole["optional-dependencies"][name] for name in optional} == optional


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_licensed_and_for_python_3_11(package):
    project = _project(package)
    assert (project["name"], project["license"]) == (package, "Apache-2.0")
    assert project["requires-python"] == ">=3.11"
    (marker,) = (PACKAGES[package] / "src").glob("*/py.typed")
    assert marker.parent.name == MODULES[package]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_command(package):
    assert _project(package)["scripts"] == {package.removesuffix("-core"): f"{MODULES[package]}.cli:main"}


def test_no_stage_imports_another_one_or_snakemake():
    stages = {*MODULES.values()} - {"shardwright"}
    for package in PACKAGES:
        forbidden = (stages | {"snakemake"}) - {MODULES[package]}
        found = {path.name: odd for path in _sources(package) if (odd := _imported(path) & forbidden)}
        assert found == {}


def _pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(need.name): str(need.specifier) for need in needs}


def test_everything_that_is_needed_is_pinned_to_one_version():
    pins = _pins()
    assert all(re.fullmatch(r"==[^,*+]+", pin) for pin in pins.values())
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    roots = {line for line in lines if line and not line.startswith("#")}
    roots |= {need for package in PACKAGES for need in _project(package)["dependencies"]}
    roots |= {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]}
    waiting = {canonicalize_name(Requirement(root).name) for root in roots} - set(PACKAGES)
    seen = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        assert name in pins, f"{name} is not in constraints.txt"
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        # A CUDA build of torch pins its own CUDA libraries exactly.
        wanted = {
            canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        }
        waiting |= {need for need in wanted if not need.startswith(("nvidia-", "cuda-", "triton"))} - seen


def test_what_is_installed_is_what_is_pinned():
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in _pins() if _is_installed(name)}
    assert {name: f"=={version}" for name, version in installed.items()} == {name: _pins()[name] for name in installed}


def _is_installed(name):
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_import_contracts_hold():
    # In a process of its own: grimp keeps what it read of a package.
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_the_readmes_commands_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert {"help", "demo", "test", "check", "bench", "clean"} <= targets
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        asked = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", text, re.MULTILINE)) | set(
            re.findall(r"`make ([a-z-]+)", text)
        )
        assert asked <= targets, page.name


def test_the_readmes_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_and_files_that_pages_name_exist():
    files = {f"/{path.relative_to(ROOT)}" for path in _tracked("*.py")}
    files |= {re.sub(r"src/shardwright_\w+/", "", file) for file in files}
    tests = {name for path in _tracked("tests/**/*.py") for name in re.findall(r"\b_?test_\w+", path.read_text())}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"`(test_\w+)`", text)) <= tests, page.name
        ours = set(re.findall(r"`([\w/]+\.py)`", text)) - {"megatron/training/arguments.py"}
        assert not {name for name in ours if not any(file.endswith(f"/{name}") for file in files)}, page.name


def test_every_rule_names_its_outputs_log_benchmark_and_resources():
    for path in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        for block in re.split(r"^rule ", path.read_text(), flags=re.MULTILINE)[1:]:
            name = block.partition(":")[0]
            if "shell:" in block and not name.startswith("write_"):
                for part in ("output:", "log:", "benchmark:", "message:", "resources:"):
                    assert part in block, f"{path.name}: {name} has no {part}"
            assert not re.search(r"^    (run|script):", block, re.MULTILINE), f"{name}: shell starts fastest"


# A family's facts and its runtime file alone say its name; longer words, such as llama3, are others' names.
_FAMILY = re.compile(rf"(?<![a-z0-9])({'|'.join(FAMILIES)})(?![a-z0-9])", re.IGNORECASE)


def _texts(path):
    """The strings and names of a file's code, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id.replace("_", " ")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name.replace("_", " ")


def _homes():
    """The files that may name families: their facts, why a type has none, and runtime files, which build on another."""
    facts = PACKAGES["shardwright-core"] / "src/shardwright/models"
    runtimes = PACKAGES["shardwright-train"] / "src/shardwright_train/models"
    files = {facts.runtime.partition(":")[0] for facts in FAMILIES.values() if facts.untrained is None}
    return {facts / "registry.py", *facts.glob("families/*.py"), *(runtimes / f"{file}.py" for file in files)}


def test_no_code_but_its_facts_and_its_runtime_names_a_family():
    files = [path for package in PACKAGES for path in _sources(package)]
    files += _tracked("workflow/**/*.py")
    homes = _homes()
    named = {
        (str(path.relative_to(ROOT)), family)
        for path in files
        for text in _texts(path)
        for family in map(str.lower, _FAMILY.findall(text))
        if path not in homes
    }
    assert named == set()
    # What is looked for is found where it may stand.
    assert "bert" in {name for path in _homes() for text in _texts(path) for name in _FAMILY.findall(text)}


SCHEDULES = ROOT / "core/src/shardwright/plan/schedules"
NAMES_OF_SCHEDULES = {"GPIPE", "ONE_F_ONE_B", "INTERLEAVED_1F1B", "gpipe", "1f1b", "interleaved_1f1b"}


def _named(node):
    """Whether an expression holds the name of a schedule."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr in NAMES_OF_SCHEDULES)
        or (isinstance(part, ast.Constant) and part.value in NAMES_OF_SCHEDULES)
        for part in ast.walk(node)
    )


def _asks_for_a_schedule(tree):
    """Whether something is compared to a schedule's name, or matched with it."""
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    cases = (node.pattern for node in ast.walk(tree) if isinstance(node, ast.match_case))
    return any(map(_named, (*compared, *cases)))


def _is_a_closed_form(tree):
    """Whether something is multiplied by the microbatches less one."""
    products = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    factors = [ast.unparse(side) for node in products for side in (node.left, node.right)]
    return any(re.fullmatch(r"\(?(\w+\.)*(m|num_microbatches) - 1\)?", factor) for factor in factors)


@pytest.mark.parametrize(
    ("seen", "allowed", "source"),
    [
        (_asks_for_a_schedule, set(), "a = 1 if plan.schedule is not Schedule.GPIPE else 2"),
        (_asks_for_a_schedule, set(), "match plan.schedule:\n    case Schedule.GPIPE:\n        pass"),
        (_is_a_closed_form, {"simulator.py"}, "t = total + (plan.num_microbatches - 1) * slowest + exposed"),
    ],
)
def test_a_schedule_says_in_one_file_what_sets_it_apart(seen, allowed, source):
    """Others ask its object; the simulator's lower bound is of passes, not of the closed form."""
    assert seen(ast.parse(source))
    files = [path for package in PACKAGES for path in _sources(package) if SCHEDULES not in path.parents]
    files += _tracked("workflow/**/*.py")
    found = {path.name for path in files if seen(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == allowed
