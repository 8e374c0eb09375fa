"""docs/architecture.md says where to add a family, a device and more: the files of each, which a test makes up."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NOT_SUPPORTED = "does not support it"
MADE_UP = {
    "A model family": {"families/NAME.py": "families, FACTS", "models/NAME.py": "models, RUNTIME"},
    "A device": {"devices.toml": 'tmp_path / "devices.toml"'},
    "An optimizer": {
        "registry.py": "monkeypatch.setitem(OPTIMIZERS, ",
        "types/plan.py": "read_document(wrong, Plan)",
        "engine/updates.py": "monkeypatch.setitem(UPDATES, ",
        "models/support.py": 'monkeypatch.setattr(support, "OPTIMIZERS_RUN", ',
    },
    "A schedule": {
        "schedules/NAME.py": "class _Eager(PipelineSchedule)",
        "registry.py": "monkeypatch.setitem(registry._SCHEDULES, ",
        "types/plan.py": 'str.__new__(Schedule, "eager")',
        "systems/NAME.py": "cannot express (the schedule eager",
    },
    "A system that runs plans": {
        "systems/NAME.py": "made_up_entry",
        "registry.py": "shardwright_search.systems.registry",
        "options.py": "shardwright_search.options",
    },
    "A field of a strategy": {
        "types/strategy.py": "shardwright.types.strategy",
        "plan/axes.py": "shardwright.plan.axes",
        **dict.fromkeys(("key.py", "layer.py", "choices.py", "parallelize.py", "supported_fields.py"), NOT_SUPPORTED),
    },
    "A kind of pass": {
        "passes.py": "str.__new__(Pass, ",
        "schedules/NAME.py": "kinds = (Pass.FORWARD, Pass.BACKWARD, WEIGHT)",
        "simulator.py": "further_ps={WEIGHT: 1}",
        "configurations.py": "no bound for schedules with passes of kind",
        "runner.py": "does not run passes of kind",
    },
}
"""The end of each file in the table of a drill, and the words of its test that stand in for it or see it refused."""


def _drill(title: str) -> tuple[list[str], str]:
    """The files of a drill's table, and the source of its tests with the scripts of the same folder that they start."""
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n#")[0]
    tests = [ROOT / name for name in re.findall(r"`(tests/\w+/test_\w+\.py)`", section)]
    scripts = {
        path for test in tests for path in test.parent.glob("made_up_*.py") if f'"{path.name}"' in test.read_text()
    }
    return re.findall(r"^\| `([^`]+)` \|", section, re.M), "".join(path.read_text() for path in {*tests, *scripts})


def test_every_drill_of_the_page_is_made_up_here() -> None:
    where = PAGE.partition("\n## Where to change what\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", where, re.M) == [*MADE_UP, "Anything else"]


@pytest.mark.parametrize("title", MADE_UP)
def test_each_file_of_a_drill_exists_and_is_made_up_by_its_test(title: str) -> None:
    files, source = _drill(title)
    assert source
    for file in files:
        (words,) = (words for end, words in MADE_UP[title].items() if file.endswith(f"/{end}"))
        assert words in source, file
        pattern = re.sub(r"^(\w+|stages/\w+)/…/", r"\1/src/*/", file).replace("NAME", "*")
        assert list(ROOT.glob(pattern)), file
    assert len(files) == len(MADE_UP[title])


def test_modules_that_a_drill_edits_are_in_its_table() -> None:
    for title in ("A system that runs plans", "A field of a strategy"):
        files, source = _drill(title)
        edited = re.findall(r'^ +"shardwright\w*\.([\w.]+)": [\[(]', source, re.M)
        assert edited and {f"{name.replace('.', '/')}.py" for name in edited} - {"types/plan.py"} <= {
            file.partition("/…/")[2] for file in files
        }
