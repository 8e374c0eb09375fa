"""What PyTorch calls private is used in one file, which says what would replace it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_FILE = ROOT / "stages/train/src/shardwright_train/torch_private.py"
SOURCES = [path for path in sorted(ROOT.glob("stages/*/src/**/*.py")) if path != ONE_FILE]
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
TRANSFORMERS = {
    "_attn_implementation",
    "_can_set_experts_implementation",
    "_experts_implementation",
    "_init_weights",
    "_keys_to_ignore_on_load_unexpected",
    "_supports_attention_backend",
    "_supports_flash_attn",
    "_supports_sdpa",
    "_tied_weights_keys",
    "_tp_plan",
}
OWN = {"_ulysses"}
DOCUMENTED = {"_thread.start_new_thread"}
"""Names of the standard library that its reference describes."""
ALLOWED = NAMED_TUPLES | TRANSFORMERS | OWN | DOCUMENTED


def _private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names(source):
    """Private names of others: imported, or looked up in something that is not the object itself or its class."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if any(map(_private, alias.name.split(".")))}
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in whole if any(map(_private, name.split(".")))}
        elif isinstance(node, ast.Attribute) and _private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls", "other"} and not owner.startswith("_"):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "setattr"}:
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and _private(str(a.value))}
    return found - ALLOWED


def test_only_one_file_uses_private_names():
    found = {path.name: names for path in SOURCES if (names := private_names(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import Size",
        "from torch.testing._internal.common_utils import run_tests",
        "from torch.distributed.tensor import _spec",
        "import torch._dynamo",
        "torch._foreach_mul_(x, 2)",
        "x.grad._spec",
        "getattr(p, '_unsharded_param', None)",
    ],
)
def test_a_private_name_elsewhere_is_seen(line):
    assert private_names(line)


def test_every_private_name_in_use_has_its_row():
    source = ONE_FILE.read_text(encoding="utf-8")
    table = re.findall(r"`([^`]+)`", ast.get_docstring(ast.parse(source)))
    listed = {part for name in table for part in name.split(".")}
    missing = [name for name in private_names(source) if name.rpartition(".")[2] not in listed]
    assert missing == []


def test_every_row_is_of_a_name_in_use():
    source = ONE_FILE.read_text(encoding="utf-8")
    docstring, code = source.split('"""', 2)[1:]
    rows = [line.split("|")[1] for line in docstring.splitlines() if line.startswith("| `")]
    names = [name.rpartition(".")[2] for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert [name for name in names if name not in code and name != "__new__"] == []
