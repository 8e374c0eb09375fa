"""What a folder may not do: one line, and nothing of it runs; and what it may lack or have too much of, by name."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weights import published
from tiny_models import tiny
from torch import Tensor

from shardwright.io import BadInput
from shardwright_train.models.base import family_named
from shardwright_train.weights.reading import Weights, open_weights

MODEL = tiny("bert", vocab_size=66)
FAMILY = family_named("bert", "test")
FILE = "model.safetensors"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    published(MODEL, tmp_path / "model")
    return tmp_path / "model"


def agreed(folder: Path, *, allow_new: bool = False) -> Weights:
    return open_weights(folder, MODEL, FAMILY, allow_new)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def indexed(folder: Path, name: str, keys: tuple[str, ...] = (QUERY,)) -> None:
    """Replace the one file by an index that says where it is."""
    (folder / FILE).rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))


class Ran:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def pickled(folder: Path) -> None:
    (folder / FILE).write_bytes(pickle.dumps(Ran(folder / "ran")))


def pickled_alone(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Ran(folder / "ran")))


def header(folder: Path, said: dict[str, object], content: bytes = b"") -> None:
    text = json.dumps(said).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + content)


def ten_gigabytes(folder: Path) -> None:
    said = {"dtype": "F32", "shape": [50000, 50000], "data_offsets": [0, 10**10]}
    header(folder, {QUERY: said}, bytes(64))


def huge_header(folder: Path) -> None:
    (folder / FILE).write_bytes(struct.pack("<Q", 2**62) + bytes(100))


def overlapping(folder: Path) -> None:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header(folder, {"a": tensor, "b": tensor}, bytes(16))


def truncated(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4])


def linked_out(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere.safetensors")
    (folder / FILE).symlink_to("../elsewhere.safetensors")


def linked_configuration(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to("../elsewhere.json")


def without_blocks_matrix(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(QUERY))


def of_whole_numbers(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)}))


def narrower(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY][:16].clone()}))


def with_another_block(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({QUERY.replace(".1.", ".4."): tensors[QUERY] + 1}))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle in disguise": (pickled, "model.safetensors: is not a valid safetensors file"),
    "pickle alone": (pickled_alone, "pickled weights are not read"),
    "declares 10 GB": (ten_gigabytes, "model.safetensors: is not a valid safetensors file"),
    "header of 2^62 bytes": (huge_header, "model.safetensors: is not a valid safetensors file"),
    "tensors that overlap": (overlapping, "model.safetensors: is not a valid safetensors file"),
    "truncated": (truncated, "model.safetensors: is not a valid safetensors file"),
    "a link out": (linked_out, "is a link out of its folder"),
    "a link to a configuration": (linked_configuration, "is a link out of its folder"),
    "index above": (lambda folder: indexed(folder, "../part.safetensors"), "not a safetensors file of its folder"),
    "index elsewhere": (lambda folder: indexed(folder, "/etc/passwd"), "not a safetensors file of its folder"),
    "index of what is not there": (
        lambda folder: indexed(folder, "more.safetensors"),
        "more.safetensors: does not exist",
    ),
    "index of another key": (
        lambda folder: indexed(folder, "part.safetensors", ("x.weight",)),
        "maps x.weight to part.safetensors, which does not contain it",
    ),
    "another family": (lambda folder: change_config(folder, model_type="gpt2"), "model_type is 'gpt2'"),
    "another activation": (lambda folder: change_config(folder, hidden_act="relu"), "hidden_act is relu"),
    "another width": (lambda folder: change_config(folder, hidden_size=64), "hidden_size is 64"),
    "a shape that is not the configuration's": (narrower, f"{QUERY} has the shape [16, 32], the model's is [32, 32]"),
    "a missing matrix": (without_blocks_matrix, f"lacks {QUERY}"),
    "whole numbers": (of_whole_numbers, "stored as I8"),
    "one block more": (with_another_block, "has tensors that the model's blocks do not: bert.encoder.layer.4."),
}


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
UNLIKE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an expert lacks a matrix": (lambda x: x.pop(EXPERT.format(3, "w3")), "lacks " + EXPERT.format(3, "w3")),
    "one expert more": (
        lambda x: x.update({EXPERT.format(5, f"w{i}"): x[EXPERT.format(4, f"w{i}")] + 0 for i in (1, 2, 3)}),
        "has 6 experts, but the model has 5",
    ),
    "another width": (
        lambda x: x.update({EXPERT.format(0, "w1"): torch.zeros(23, 32)}),
        EXPERT.format(0, "w1") + " has the shape [23, 32], the model's is [24, 32]",
    ),
    "whole and in pieces": (
        lambda x: x.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(5, 32, 24)}),
        "has model.layers.0.mlp.experts.down_proj whole and in pieces",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_folder_whose_experts_are_not_the_models_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    model, (change, words) = tiny("mixtral"), UNLIKE[name]
    published(model, tmp_path / "model")
    change_tensors(tmp_path / "model", change)
    with pytest.raises(BadInput) as refused:
        open_weights(tmp_path / "model", model, family_named("mixtral", "test"), allow_new=True)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_experts_that_a_folder_has_whole_are_read_as_they_are(tmp_path: Path) -> None:
    model, name = tiny("mixtral"), "model.layers.1.mlp.experts.gate_up_proj"
    stock = published(model, tmp_path / "model")
    family, whole, box = family_named("mixtral", "test"), stock.get_parameter(name).detach(), ((1, 4), (1, 2), (5, 24))

    def fused(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "layers.1" in key and key.endswith(("w1.weight", "w3.weight"))]:
            del tensors[key]
        tensors[name] = whole

    for change in (lambda _: None, fused):
        change_tensors(tmp_path / "model", change)
        window = torch.empty(3, 1, 19, 32)
        weights = open_weights(tmp_path / "model", model, family, allow_new=False)
        assert weights.read(window, name, (5, 2, 24, 32), (*box, (0, 32)))
        assert torch.equal(window[:, 0], whole[1:4, 24 + 5 : 48])


def test_layers_that_predict_further_tokens_are_named_and_not_used(tmp_path: Path) -> None:
    model, folder = tiny("deepseek_v3"), tmp_path / "model"
    published(model, folder)
    further = {f"model.layers.4.{name}": torch.zeros(32) for name in ("enorm.weight", "shared_head.norm.weight")}
    change_tensors(folder, lambda tensors: tensors.update(further))
    weights = open_weights(folder, model, family_named("deepseek_v3", "test"), allow_new=False)
    assert weights.surplus == tuple(further)
    assert weights.notes("float32") == [f"not used: {', '.join(further)}"]
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.zeros(32)}))
    with pytest.raises(BadInput, match=r"has tensors that the model's blocks do not: model\.layers\.3\.enorm\.weight"):
        open_weights(folder, model, family_named("deepseek_v3", "test"), allow_new=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(folder: Path, name: str) -> None:
    change, words = HOSTILE[name]
    change(folder)
    with pytest.raises(BadInput) as refused:
        agreed(folder, allow_new=True)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not (folder / "ran").exists()


def test_a_base_model_lacks_a_head_and_has_a_pooler(folder: Path) -> None:
    """Its keys have no prefix, and norms may have their old names."""

    def stripped(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            values = tensors.pop(key)
            if key.startswith("bert."):
                older = key.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
                tensors[older.replace("LayerNorm.bias", "LayerNorm.beta")] = values
        tensors["pooler.dense.weight"] = torch.zeros(32, 32)
        tensors["embeddings.position_ids"] = torch.arange(64)

    change_tensors(folder, stripped)
    with pytest.raises(BadInput, match=r"lacks cls\.predictions\.bias, .* of the model's head.*--new-weights"):
        agreed(folder)
    found = agreed(folder, allow_new=True)
    assert "cls.predictions.transform.dense.weight" in found.new
    assert all(name.startswith("cls.predictions.") for name in found.new)
    assert found.surplus == ("pooler.dense.weight",)
    assert found.notes("bfloat16")[1:] == ["not used: pooler.dense.weight", "stored in float32, kept in bfloat16"]


def test_the_hubs_cache_links_to_its_blobs(folder: Path) -> None:
    revision = folder.parent / "cache" / "snapshots" / "a1b2"
    blobs = folder.parent / "cache" / "blobs"
    revision.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", FILE):
        (folder / name).rename(blobs / name)
        (revision / name).symlink_to(f"../../blobs/{name}")
    assert agreed(revision).files == (revision / FILE,)


def test_code_that_a_folder_names_is_not_run(folder: Path) -> None:
    (folder / "x.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Y: pass\n")
    change_config(folder, auto_map={"AutoModelForMaskedLM": "x.Y"})
    assert agreed(folder).new == () and not (folder / "ran").exists()


def test_notes_of_the_tools_that_wrote_a_folder_change_nothing(folder: Path) -> None:
    change_config(folder, unsloth_fixed=True, _attn_implementation_autoset=True, loss_type="ForMaskedLM")
    assert agreed(folder).new == ()


def test_two_values_of_one_parameter_are_no_tie(folder: Path) -> None:
    table = "bert.embeddings.word_embeddings.weight"
    change_tensors(folder, lambda tensors: tensors.update({"cls.predictions.decoder.weight": tensors[table] + 0}))
    weights, box = open_weights(folder, MODEL, FAMILY, allow_new=False), ((3, 9), (0, 32))
    window = torch.empty(6, 32)
    assert weights.read(window, "cls.predictions.decoder.weight", (66, 32), box)
    assert torch.equal(window, load_file(folder / FILE)[table][3:9])
    change_tensors(folder, lambda tensors: tensors["cls.predictions.decoder.weight"][5].add_(1))
    with pytest.raises(BadInput, match="but the model ties them"):
        weights.read(window, table, (66, 32), box)
