"""Published weights in few bits come in as transformers dequantizes them, to the bit, whatever part a rank reads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_weights import published
from tiny_models import stock_model, tiny
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwright.io import BadInput
from shardwright.types import Model
from shardwright_train.models.base import family_named
from shardwright_train.weights.reading import open_weights
from shardwright_train.weights.stored import Stored, header, with_values

FILE, FP8 = "model.safetensors", {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(autouse=True)
def _in_float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def _fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _stored(folder: Path, tensors: dict[str, Tensor], stored_in: object) -> dict[str, Stored]:
    """Tensors in files of their own, opened."""
    held = {}
    for number, (key, x) in enumerate(tensors.items()):
        save_file({key: x}, folder / f"{number}.safetensors")
        held |= header(folder / f"{number}.safetensors")
    return with_values(folder / "config.json", stored_in, held)


def _part(stored: Stored, *box: tuple[int, int]) -> Tensor:
    with safe_open(stored.file, "pt") as opened:
        return stored.part(opened, [slice(low, high) for low, high in box])


@pytest.mark.parametrize("scales", ["float32", "bfloat16", "uint8", "float8_e8m0fnu", "one", "of_experts"])
def test_blocks_of_fp8_are_those_of_transformers(scales: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outer = (2,) if scales == "of_experts" else ()
    weight, factors = _fp8(*outer, 256, 384), torch.rand(*outer, 2, 3) + 0.1
    if scales == "uint8":
        factors = torch.randint(100, 140, (2, 3), dtype=torch.uint8)
    elif scales == "one":
        factors = torch.tensor(0.37)
    elif scales != "of_experts":
        factors = factors.to(getattr(torch, scales))
    stored = _stored(tmp_path, {"a.weight": weight, "a.weight_scale_inv": factors}, FP8)
    assert stored.keys() == {"a.weight"}
    whole = Fp8Dequantize(None)._dequantize_one(weight, factors, torch.float32)
    for low, high, left, right in ((0, 256, 0, 384), (7, 9, 100, 300), (128, 256, 256, 384), (127, 130, 383, 384)):
        box = *((0, 2) for _ in outer), (low, high), (left, right)
        assert torch.equal(_part(stored["a.weight"], *box), whole[..., low:high, left:right])
    narrow = torch.empty(whole.shape, dtype=torch.bfloat16)
    narrow.copy_(_part(stored["a.weight"], *((0, size) for size in whole.shape)))
    assert torch.equal(narrow, Fp8Dequantize(None)._dequantize_one(weight, factors, torch.bfloat16))


def test_blocks_at_an_edge_are_cut_as_deepseek_does(tmp_path: Path) -> None:
    """A published matrix of DeepSeek-V3 has 576 rows and 5 rows of scales, which transformers refuses."""
    weight, factors = _fp8(576, 200), torch.rand(5, 2) + 0.1
    stored = _stored(tmp_path, {"a.weight": weight, "a.weight_scale_inv": factors}, FP8)["a.weight"]
    rows, columns = torch.arange(576)[:, None] // 128, torch.arange(200) // 128
    assert torch.equal(_part(stored, (0, 576), (0, 200)), weight.float() * factors[rows, columns])
    assert torch.equal(_part(stored, (511, 576), (5, 131)), (weight.float() * factors[rows, columns])[511:, 5:131])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_mxfp4_are_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 6, 5), dtype=torch.uint8)
    stored = _stored(
        tmp_path, {"a_blocks": blocks, "a_scales": scales, "a_bias": torch.ones(3)}, {"quant_method": "mxfp4"}
    )
    assert stored.keys() == {"a", "a_bias"} and stored["a"].shape == (3, 160, 6)
    whole = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for box in (((0, 3), (0, 160), (0, 6)), ((1, 2), (31, 97), (2, 5)), ((2, 3), (64, 65), (0, 1))):
        window = torch.empty([high - low for low, high in box], dtype=dtype)
        window.copy_(_part(stored["a"], *box))
        assert torch.equal(window, whole[tuple(slice(low, high) for low, high in box)])


def _in_fp8(tensors: dict[str, Tensor]) -> None:
    """Matrices of blocks in FP8, in blocks of 2 x 2, as DeepSeek-V3 has them."""
    for key in [
        key for key in tensors if key.endswith("_proj.weight") or ("kv_a_proj" in key and key.endswith("weight"))
    ]:
        matrix = tensors[key]
        rows, columns = (side // 2 for side in matrix.shape)
        blocks = matrix.view(rows, 2, columns, 2)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[key] = (blocks / scales[:, None, :, None]).view(matrix.shape).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scales


def _in_mxfp4(tensors: dict[str, Tensor]) -> None:
    """Experts in MXFP4, as gpt-oss has them."""
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(110, 130, (experts, columns, rows // 32), dtype=torch.uint8)


CASES: dict[str, tuple[Callable[[], Model], Change, dict[str, Any]]] = {
    "deepseek_v3": (lambda: tiny("deepseek_v3", vocab_size=66), _in_fp8, FP8 | {"weight_block_size": [2, 2]}),
    "gpt_oss": (lambda: tiny("gpt_oss", vocab_size=66, intermediate_size=64), _in_mxfp4, {"quant_method": "mxfp4"}),
}


def _quantized(name: str, folder: Path) -> Model:
    """A folder as a model is published in few bits."""
    made, change, stored_in = CASES[name]
    model = made()
    published(model, folder)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})
    _configure(folder, stored_in)
    return model


def _configure(folder: Path, stored_in: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored_in}))


@pytest.mark.parametrize("name", CASES)
def test_a_published_folder_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    model = _quantized(name, tmp_path)
    stock_class: Any = type(stock_model(model))
    wanted = dict(stock_class.from_pretrained(tmp_path, dtype=torch.float32).state_dict())
    weights = open_weights(tmp_path, model, family_named(name, "test"), allow_new=False)
    assert weights.surplus == ()
    method = CASES[name][2]["quant_method"]
    assert weights.notes("float32") == [f"stored in {', '.join(sorted(('float32', method)))}, kept in float32"]
    for parameter, whole in wanted.items():
        # The runtime has matrices side by side in a dim of their own.
        beside = parameter in weights.pieces and len(weights.pieces[parameter].source.patterns) > 1
        value = whole.unflatten(1, (2, -1)) if beside else whole
        window = torch.full(value.shape, torch.nan)
        assert weights.read(window, parameter, value.shape, [(0, size) for size in value.shape]), parameter
        assert torch.equal(window, value), parameter
        part = [(size // 3, size) for size in value.shape]
        window = torch.full([high - low for low, high in part], torch.nan)
        weights.read(window, parameter, value.shape, part)
        assert torch.equal(window, value[tuple(slice(low, high) for low, high in part)]), parameter


@pytest.mark.parametrize(
    ("tensors", "stored_in", "message"),
    [
        ({"a.weight": _fp8(8, 8)}, {"quant_method": "gptq"}, "weights in gptq are not read (fp8 in blocks and mxfp4"),
        ({"a.weight": _fp8(8, 8)}, {}, "weights in None are not read"),
        (
            {"a.weight_scale_inv": torch.ones(1)},
            None,
            "has no quantization_config, but the folder holds a.weight",
        ),
        (
            {"a_blocks": torch.ones(1)},
            None,
            "has no quantization_config, but the folder holds a_blocks: fetch",
        ),
        (
            {"a.weight": _fp8(8, 8)},
            FP8 | {"weight_block_size": [0, 1]},
            "weight_block_size [0, 1] is not two positive integers",
        ),
        (
            {"a.weight": _fp8(8, 8), "a.weight_scale_inv": torch.ones(3, 1)},
            FP8,
            "a.weight_scale_inv has the shape [3, 1] for a matrix [8, 8] in blocks of 128 x 128: have",
        ),
        (
            {"a.weight": torch.ones(8, 8, dtype=torch.int8), "a.weight_scale_inv": torch.ones(1, 1)},
            FP8,
            "a.weight is stored as I8 with scales as F32, which is not read",
        ),
        (
            {"a_blocks": torch.ones(1, 2, 3, 8, dtype=torch.uint8), "a_scales": torch.ones(1, 2, 3, dtype=torch.uint8)},
            {"quant_method": "mxfp4"},
            "a_blocks has the shape [1, 2, 3, 8] for scales [1, 2, 3]: have transformers load and dequantize the model",
        ),
    ],
)
def test_other_forms_are_refused_by_name(
    tensors: dict[str, Tensor], stored_in: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        _stored(tmp_path, tensors, stored_in)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_in_fp8_without_scales_are_refused(tmp_path: Path) -> None:
    model = _quantized("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / FILE)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(BadInput, match=r"o_proj\.weight is stored as F8_E4M3, which cannot be trained"):
        open_weights(tmp_path, model, family_named("deepseek_v3", "test"), allow_new=False)
