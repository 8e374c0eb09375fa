"""Whisper's blocks cost and keep what stacks of unlike lengths do; positions are sines, and data random so far."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import initial_layer, tiny
from transformers.models.whisper.modeling_whisper import sinusoids

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.io import BadInput
from shardwright.types import Attention, LayerStrategy, Model, Precision
from shardwright_train.commands.documents import describe_folder
from shardwright_train.models.base import family_named

SAMPLES, TOKENS, FRAMES, HIDDEN, INNER = 3, 96, 160, 128, 320
CONFIG = {
    "model_type": "whisper", "d_model": HIDDEN, "vocab_size": 64, "num_mel_bins": 8, "decoder_start_token_id": 1,
    "max_source_positions": FRAMES, "max_target_positions": TOKENS,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
}  # fmt: skip
FORMATS = Precision(parameters="float32", compute="bfloat16", reduce="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("whisper")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return describe_folder(folder, "whisper", TOKENS)


def saved_bytes(layers: dict[str, int]) -> int:
    """Bytes of the distinct tensors, parameters apart, that autograd saves in a model of so many blocks."""
    runtime = family_named("whisper", "test")
    made = runtime.configured(CONFIG | layers)
    made.use_cache, made._attn_implementation = False, "sdpa"
    stock = runtime.stock(made).to(torch.bfloat16).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in stock.parameters()}
    held = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = torch.zeros(SAMPLES, 8, 2 * FRAMES, dtype=torch.bfloat16)
        stock.model(features, decoder_input_ids=torch.zeros(SAMPLES, TOKENS, dtype=torch.long))
        return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize(("kind", "positions", "attentions"), [("encoder", FRAMES, 1), ("decoder", TOKENS, 2)])
def test_a_block_keeps_what_autograd_saves(model: Model, kind: str, positions: int, attentions: int) -> None:
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    measured = saved_bytes({**layers, f"{kind}_layers": 3}) - saved_bytes(layers)
    strategy = LayerStrategy(type=kind, tp_size=1, dp_size=1)
    machine = Machine(1e12, 1e12, Link(1e12, 0.0))
    estimate = estimate_layer(model, kind, strategy, SAMPLES, FORMATS, Attention.SDPA, machine)
    # The estimate has no float32 sums of a softmax or a norm, of which there is one a position and head, or two.
    sums = SAMPLES * positions * 4 * (4 * attentions + 2 * (1 + attentions))
    assert measured - sums <= estimate.activation_bytes <= measured


def test_a_block_of_the_decoder_multiplies_as_many_keys_as_the_encoder_has_states(model: Model) -> None:
    square = HIDDEN * HIDDEN
    queries = 2 * TOKENS * (6 * square + 2 * HIDDEN * INNER)
    keys = 2 * FRAMES * 2 * square
    scores = 4 * HIDDEN * (TOKENS * TOKENS + TOKENS * FRAMES)
    assert model.types["decoder"].forward_flops_per_sample == queries + keys + scores
    assert [tensor.sequence_length for tensor in model.types["decoder"].outputs] == [FRAMES, TOKENS]
    # Ranks that share out the table of tokens sum what they look up; convolutions each has whole.
    assert [region.leaves for region in model.types["embedding"].regions] == ["decoder_states"]


def test_the_encoders_positions_are_sines_that_are_not_trained() -> None:
    whisper, name = tiny("whisper"), "model.encoder.embed_positions.weight"
    assert torch.equal(initial_layer(whisper, "embedding")[name], sinusoids(20, 32))
    frozen = [p.name for kind in whisper.types.values() for p in kind.parameters if not p.trained]
    assert frozen == [name]


def test_folders_without_spectrograms_are_refused_in_one_line(tmp_path: Path) -> None:
    learns = family_named("whisper", "test").learns(tiny("whisper"))
    with pytest.raises(BadInput, match=r"features.npy: No such file or directory: check the path"):
        learns.open(tmp_path, seed=0)
