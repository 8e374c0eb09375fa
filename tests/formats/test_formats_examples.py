"""The golden examples, and what is generated from the types."""

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

from shardwright.io import Document, read_document, write_document
from shardwright.schema import generate as schemas
from shardwright.types.hardware_profile import read_hardware_profile, write_hardware_profile
from shardwright.types.model_profile import read_model_profile, write_model_profile

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "core" / "examples"
KINDS = {kind.FORMAT.removeprefix("shardwright."): kind for kind in schemas.DOCUMENTS}


@pytest.mark.parametrize("name", KINDS)
def test_an_example_document_is_read_and_rewritten_byte_for_byte(name: str, tmp_path: Path) -> None:
    example = EXAMPLES / f"{name}.json"
    write_document(tmp_path / "again.json", read_document(example, KINDS[name]))
    assert (tmp_path / "again.json").read_bytes() == example.read_bytes()


def test_the_example_hardware_profile_is_read_and_rewritten_byte_for_byte(tmp_path: Path) -> None:
    example = EXAMPLES / "hardware_profile.h5"
    write_hardware_profile(tmp_path / "again.h5", read_hardware_profile(example))
    assert (tmp_path / "again.h5").read_bytes() == example.read_bytes()


def test_the_example_model_profile_is_read_and_rewritten_byte_for_byte(tmp_path: Path) -> None:
    example = EXAMPLES / "model_profile.h5"
    write_model_profile(tmp_path / "again.h5", read_model_profile(example))
    assert (tmp_path / "again.h5").read_bytes() == example.read_bytes()


def test_the_script_writes_the_very_examples_that_are_kept(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "write_examples.py"))["write_examples"](tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in EXAMPLES.iterdir() if path.suffix in (".json", ".h5")}


@pytest.mark.parametrize("name", KINDS)
def test_a_schema_accepts_its_example_and_refuses_an_unknown_key(name: str) -> None:
    schema = json.loads((ROOT / "core" / "schemas" / f"{name}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    example = json.loads((EXAMPLES / f"{name}.json").read_text())
    validator.validate(example)
    for broken in (
        example | {"surprise": 1},
        example | {"version": example["version"] + 1},
        example | {"format": "shardwright.other"},
        {key: value for key, value in example.items() if key != "version"},
    ):
        assert not validator.is_valid(broken)


def test_every_object_with_fields_refuses_unknown_keys_in_its_schema() -> None:
    for kind in schemas.DOCUMENTS:
        schema = schemas.json_schema(kind)
        for described in (schema, *schema["$defs"].values()):
            assert "properties" not in described or described["additionalProperties"] is False, described["title"]


def test_every_field_says_what_it_means() -> None:
    for kind in schemas.DOCUMENTS:
        schema = schemas.json_schema(kind)
        for described in (schema, *schema["$defs"].values()):
            for field, of in described.get("properties", {}).items():
                assert field in ("format", "version") or of["description"], f"{described['title']}.{field}"


def test_the_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().err


def test_check_names_the_stale_file_in_one_line_and_writing_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "pyproject.toml").touch()
    assert schemas.main(["--root", str(tmp_path)]) == 0
    stale = tmp_path / "core" / "schemas" / "plan.schema.json"
    stale.write_text(stale.read_text().replace("shardwright.plan", "shardwright.plane"))
    kept = stale.read_bytes()

    assert schemas.main(["--check", "--root", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(stale) in line
    assert stale.read_bytes() == kept

    assert schemas.main(["--root", str(tmp_path)]) == 0
    assert schemas.main(["--check", "--root", str(tmp_path)]) == 0


def test_generating_outside_the_repository_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        schemas.main(["--root", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_document_of_the_contract_has_a_schema() -> None:
    assert set(Document.__subclasses__()) >= set(schemas.DOCUMENTS)
    ours = {kind for kind in Document.__subclasses__() if kind.__module__.startswith("shardwright.types.")}
    assert ours == set(schemas.DOCUMENTS)
