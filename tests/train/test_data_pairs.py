"""A folder of images or recordings with texts becomes the arrays that a run reads, or one line that says why not."""

import json
import wave
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_calls import call
from PIL import Image
from tiny_models import tiny
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import WhisperFeatureExtractor

from shardwright.io import BadInput
from shardwright_train.cli import APP
from shardwright_train.data.arrays import Pairs, open_pairs
from shardwright_train.data.encoder_decoder import Transcription
from shardwright_train.data.objectives import ImageText
from shardwright_train.data.sampling import check_described
from shardwright_train.data.share import BatchShare
from shardwright_train.data.split import WHOLE, Fractions, Split, SplitPart
from shardwright_train.data.tokenizer import END_OF_TEXT, trained
from shardwright_train.models.base import family_named

CAPTIONS = [
    {"text": "a cat", "image": "cat.png"},
    {"text": "see <image>it", "image": "dog.png"},
    {"text": "no more than a text"},
]
IMAGES = ImageText(300, 12, 299, 4, (3, 4, 4), (0.5,), (0.5,))
SPEECH = Transcription(300, 8, 7, 5, 100)


def _listed(folder: Path, name: str, lines: list[dict[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _captions(folder: Path) -> Path:
    _listed(folder, "captions.jsonl", CAPTIONS)
    for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 255, 51))):
        Image.new("RGB", (8, 6), colour).save(folder / f"{name}.png")
    return folder


def _record(file: Path, seconds: float, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> np.ndarray:
    sound = (np.sin(np.arange(int(seconds * rate)) / 20) * 9000).astype("<i2")
    with wave.open(str(file), "wb") as opened:
        opened.setparams((channels, width, rate, 0, "NONE", ""))
        opened.writeframes(np.repeat(sound, channels).tobytes() if width == 2 else bytes(len(sound)))
    return sound.astype(np.float32) / 2**15


def _speech(folder: Path) -> Path:
    _listed(folder, "transcripts.jsonl", [{"text": "yes", "audio": "1.wav"}, {"text": "no, never", "audio": "2.wav"}])
    _record(folder / "1.wav", 0.5)
    _record(folder / "2.wav", 0.25, channels=2)
    return folder


def _prepare(folder: Path, source: str, *options: str) -> tuple[int, str]:
    asked = ("--text", str(folder / "in"), "--source", source, "--out", str(folder / "out"), *options)
    if "--tokenizer" not in options:
        asked += ("--vocab-size", "257")
    ended = call(APP, "prepare", *asked)
    return ended.exit_code, ended.stderr


def _captioned(folder: Path) -> Path:
    _captions(folder / "in")
    assert _prepare(folder, "captions", "--image-size", "4") == (0, "samples: 3, images: 2, tokens: 35\n")
    return folder / "out"


def test_captions_become_texts_with_the_positions_of_their_image(tmp_path: Path) -> None:
    folder = _captioned(tmp_path)
    assert {file.name for file in folder.iterdir()} == {"images.npy", "tokens.npy", "samples.npy", "tokenizer.json"}
    opened = IMAGES.open(folder, 0)
    assert isinstance(opened, Pairs) and opened.per_epoch == 3
    batch = opened.read(0, BatchShare(1, 3))
    order = opened.order.chosen(np.arange(3)).tolist()
    rows = {place: row for row, place in enumerate(order)}
    tokens, labels = batch["tokens"], batch["labels"]
    inside = (tokens == 299).tolist()
    assert inside[rows[0]] == [True] * 4 + [False] * 8
    assert inside[rows[1]] == [False] * 4 + [True] * 4 + [False] * 4
    assert inside[rows[2]] == [False] * 12
    # The text behind an image is predicted from its last position, the image from none, nor what fills a text up.
    assert labels[rows[0]].tolist() == [-100] * 3 + tokens[rows[0]][4:9].tolist() + [0] + [-100] * 3
    assert labels[rows[1]][3:7].tolist() == [-100] * 4 and labels[rows[1]][7] == tokens[rows[1]][8]
    assert opened.counted(0, 3) == int((labels != -100).sum())
    pixels = batch["pixel_values"][:, :, 0, 0]
    assert pixels[rows[0]].tolist() == [1, -1, -1] and bool((batch["pixel_values"][rows[2]] == -1).all())
    assert pixels[rows[1]].tolist() == pytest.approx([-1, 1, -0.6])
    left = opened.read(0, BatchShare(1, 3, left_out=frozenset({"pixel_values", "labels"})))
    assert set(left) == {"tokens"} and torch.equal(left["tokens"], tokens)


def test_a_text_has_several_images_each_in_its_place(tmp_path: Path) -> None:
    lines = [
        {"text": "is <image>it<image>", "image": ["dog.png", "cat.png"]},
        {"text": "see", "image": "cat.png"},
        {"text": "a text"},
        {"text": "both", "image": ["cat.png", "dog.png"]},
    ]
    _captions(tmp_path / "in")
    _listed(tmp_path / "in", "captions.jsonl", lines)
    assert _prepare(tmp_path, "captions", "--image-size", "4") == (0, "samples: 4, images: 5, tokens: 27\n")
    assert np.load(tmp_path / "out" / "samples.npy")[:, 2].tolist() == [0, 2, -1, 3]
    several = replace(IMAGES, sequence_length=20, images=2)
    opened = several.open(tmp_path / "out", 0)
    assert isinstance(opened, Pairs)
    batch = opened.read(0, BatchShare(1, 4))
    rows = {place: row for row, place in enumerate(opened.order.chosen(np.arange(4)).tolist())}
    inside = batch["tokens"] == 299
    assert inside[rows[0]].tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 4 + [False] * 7
    assert [int(inside[rows[place]].sum()) for place in range(4)] == [8, 4, 0, 8]
    assert batch["pixel_values"].shape == (4, 2, 3, 4, 4)
    red, green, black = (pytest.approx(x) for x in ([1, -1, -1], [-1, 1, -0.6], [-1, -1, -1]))
    seen = [batch["pixel_values"][rows[place], :, :, 0, 0].tolist() for place in range(4)]
    assert seen == [[green, red], [red, black], [black, black], [red, green]]
    with pytest.raises(BadInput, match="sample 0 has 2 images, over the 1 of images_per_sample"):
        IMAGES.open(tmp_path / "out", 0)
    with pytest.raises(BadInput, match="sample 0 has an image of 4 positions from 9 on, over 12"):
        replace(several, sequence_length=12).open(tmp_path / "out", 0)
    np.save(tmp_path / "out" / "images.npy", np.zeros((4, 3, 4, 4), np.uint8))
    with pytest.raises(BadInput, match="sample 3 refers to images past the last one: prepare it again"):
        several.open(tmp_path / "out", 0)


def _model(folder: Path) -> tuple[Path, int, int]:
    """Write a byte-level tokenizer whose template puts a token at both ends; return it with them."""
    tokenizer = trained(iter(["a cat"]), 257, "text").tokenizer
    tokenizer.add_special_tokens(["<|task|>", "<bos>"])
    first, last = (tokenizer.token_to_id(token) for token in ("<bos>", END_OF_TEXT))
    ends = [("<bos>", first), (END_OF_TEXT, last)]
    tokenizer.post_processor = TemplateProcessing(single=f"<bos> $A {END_OF_TEXT}", special_tokens=ends)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    return folder, first, last


def _texts(folder: Path) -> list[list[int]]:
    tokens, samples = (np.load(folder / f"{name}.npy") for name in ("tokens", "samples"))
    return [tokens[begin : begin + count].tolist() for begin, count, _ in samples]


def test_a_template_is_around_each_text_and_not_around_its_image(tmp_path: Path) -> None:
    _captions(tmp_path / "in")
    model, first, last = _model(tmp_path / "model")
    assert _prepare(tmp_path, "captions", "--image-size", "4", "--tokenizer", str(model))[0] == 0
    encode = partial(Tokenizer.from_file(str(model / "tokenizer.json")).encode, add_special_tokens=False)
    cat, see, it, none = (encode(text).ids for text in ("a cat", "see ", "it", "no more than a text"))
    assert _texts(tmp_path / "out") == [
        [first, -1, *cat, last],
        [first, *see, -1, *it, last],
        [first, *none, last],
    ]


def test_what_is_said_begins_with_the_task_that_it_names(tmp_path: Path) -> None:
    """The tokenizer's own first tokens stand before other texts; the decoder's first one is no label."""
    _speech(tmp_path / "in")
    said = [{"text": "<|task|>yes", "audio": "1.wav"}, {"text": "no", "audio": "2.wav"}]
    _listed(tmp_path / "in", "transcripts.jsonl", said)
    model, first, last = _model(tmp_path / "model")
    asked = ("--mel-bins", "5", "--seconds", "1", "--tokenizer", str(model))
    assert _prepare(tmp_path, "speech", *asked)[0] == 0
    encode = partial(Tokenizer.from_file(str(model / "tokenizer.json")).encode, add_special_tokens=False)
    task, no = (encode(text).ids for text in ("<|task|>yes", "no"))
    assert _texts(tmp_path / "out") == [[*task, last], [first, *no, last]]
    batch = replace(SPEECH, first_token=first).of_texts([np.array(text) for text in _texts(tmp_path / "out")])
    assert batch["decoder_tokens"][1, : len(no) + 2].tolist() == [first, *no, last][: len(no) + 2]
    assert batch["labels"][1].tolist() == [*no, last, *[-100] * (8 - len(no) - 1)]
    assert batch["labels"][0, : len(task)].tolist() == task


def test_a_split_and_an_identity_are_those_of_the_files(tmp_path: Path) -> None:
    folder = _captioned(tmp_path)
    part = SplitPart(Split.VALID, Fractions(valid=0.34))
    whole, valid = IMAGES.open(folder, 0), IMAGES.open(folder, 0, part)
    assert valid.per_epoch == 1 and len({whole.sha256, valid.sha256}) == 2
    assert IMAGES.open(folder, 5).sha256 == whole.sha256
    longer = ImageText(300, 13, 299, 4, (3, 4, 4), (0.5,), (0.5,))
    assert longer.open(folder, 0).sha256 != whole.sha256
    with pytest.raises(BadInput, match="are too few for the test split"):
        IMAGES.open(folder, 0, SplitPart(Split.TEST))


def test_clip_gets_pixels_as_it_was_trained_with_them() -> None:
    family, model = family_named("llava", "test"), tiny("llava")
    objective = family.learns(model)
    assert isinstance(objective, ImageText)
    grey = objective.of_inputs(np.full((1, 1, 3, 12, 12), 51, np.uint8))["pixel_values"]
    expected = [(0.2 - mean) / deviation for mean, deviation in (
        (0.48145466, 0.26862954), (0.4578275, 0.26130258), (0.40821073, 0.27577711))]  # fmt: skip
    assert grey[0, :, 0, 0].tolist() == pytest.approx(expected)


def test_recordings_become_spectrograms_and_their_words_labels(tmp_path: Path) -> None:
    _speech(tmp_path / "in")
    ended = _prepare(tmp_path, "speech", "--mel-bins", "5", "--seconds", "1")
    assert ended == (0, "samples: 2, features: 2, tokens: 14\n")
    check_described(tmp_path / "out")
    opened = SPEECH.open(tmp_path / "out", 0)
    batch = opened.read(0, BatchShare(1, 2))
    order = opened.order.chosen(np.arange(2)).tolist()
    first, second = (batch["labels"][order.index(place)] for place in (0, 1))
    assert (first != -100).sum() == 4 and first[3] == 0 and (second != -100).all()
    assert batch["decoder_tokens"][order.index(0)].tolist() == [7, *first[:4].tolist(), 7, 7, 7]
    extractor = WhisperFeatureExtractor(feature_size=5, chunk_length=1)
    for place, seconds in ((0, 0.5), (1, 0.25)):
        sound = _record(tmp_path / "again.wav", seconds)
        wanted = extractor(sound, sampling_rate=16_000, return_tensors="np")["input_features"][0]
        found = batch["input_features"][order.index(place)].numpy()
        assert found.shape == (5, 100) and np.allclose(found, wanted, atol=1e-5)
    assert opened.counted(0, 2) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "captions.jsonl").write_text(""), "captions.jsonl: is empty"),
        (lambda folder: (folder / "captions.jsonl").write_text("{}"), "captions.jsonl: line 1 is not a sample"),
        (
            lambda folder: _listed(folder, "captions.jsonl", [{"text": "<image>", "image": "x\0.png"}]),
            r"captions.jsonl: refers to 'x\x00.png', which does not exist: fix the listing",
        ),
        (
            lambda folder: _listed(folder, "captions.jsonl", [{"text": "<image>", "image": "../x.png"}]),
            "refers to ../x.png, which is outside its folder",
        ),
        (
            lambda folder: _listed(folder, "captions.jsonl", [{"text": "<image>a<image>", "image": "cat.png"}]),
            "line 1 has 2 places for its 1 images",
        ),
        (
            lambda folder: _listed(folder, "captions.jsonl", [{"text": "<image>"}]),
            "line 1 has 1 places for its 0 images",
        ),
        (lambda folder: (folder / "cat.png").unlink(), "cat.png: is not a valid JPEG or PNG"),
        (lambda folder: _listed(folder, "captions.jsonl", [{"text": "a", "audio": "x"}]), "line 1 names audio"),
    ],
)
def test_captions_that_are_none_are_one_line_and_leave_nothing(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    change(_captions(tmp_path / "in"))
    code, said = _prepare(tmp_path, "captions", "--image-size", "4")
    assert code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: _record(folder / "1.wav", 1.5), "1.wav: is 1.5 s long, which exceeds 1 s"),
        (lambda folder: _record(folder / "1.wav", 0.5, rate=8000), "has 16 bits a sample and 8000 samples/s"),
        (lambda folder: _record(folder / "1.wav", 0.5, width=1), "has 8 bits a sample and 16000 samples/s"),
        (lambda folder: (folder / "1.wav").write_bytes(b"RIFF"), "1.wav: is not a valid WAV file"),
        (
            lambda folder: (folder / "1.wav").write_bytes((folder / "1.wav").read_bytes()[:99]),
            "ends before its samples",
        ),
        (lambda folder: _listed(folder, "transcripts.jsonl", [{"text": "a"}]), "line 1 has no recording"),
    ],
)
def test_recordings_that_are_none_are_one_line_and_leave_nothing(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    change(_speech(tmp_path / "in"))
    code, said = _prepare(tmp_path, "speech", "--mel-bins", "5", "--seconds", "1")
    assert code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("captions", (), "--image-size: is missing"),
        ("speech", (), "--mel-bins: is missing"),
        ("text", ("--mel-bins", "80"), "--mel-bins: applies only to speech"),
        ("captions", ("--image-size", "4", "--tokenizer", "none"), "tokenizer.json"),
    ],
)
def test_options_that_are_missing_are_named(
    source: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    _captions(tmp_path / "in")
    code, said = _prepare(tmp_path, source, *options)
    assert code == 2 and message in said


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("images.npy", np.zeros((2, 3, 5, 5), np.uint8), r"the model takes uint8 \[any, 3, 4, 4\]"),
        ("tokens.npy", np.zeros(35, np.int64), r"is int64 \[35\]: write int32"),
        ("tokens.npy", np.full(35, 300, np.int32), "has tokens from 300 to 300, the model's are below 300"),
        ("tokens.npy", np.full(35, 299, np.int32), "sample 0 has 0 places for 1 images"),
        ("samples.npy", np.array([[0, 99, 0]]), "sample 0 points outside the other files"),
        ("samples.npy", np.array([[0, 2**62, 2]]), "sample 0 points outside the other files"),
        ("samples.npy", np.array([[0, 6, -1]]), "sample 0 has 1 places for 0 images"),
        ("samples.npy", np.zeros((0, 3), np.int64), "write int64"),
        ("samples.npy", np.array([[25, 1, -1]]), "sample 0 has fewer than two tokens"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, array: np.ndarray, message: str, tmp_path: Path) -> None:
    folder = _captioned(tmp_path)
    np.save(folder / name, array)
    with pytest.raises(BadInput, match=message):
        open_pairs(folder, IMAGES, 0, WHOLE)


def test_an_image_that_leaves_no_text_is_refused(tmp_path: Path) -> None:
    folder = _captioned(tmp_path)
    with pytest.raises(BadInput, match="sample 1 has an image of 9 positions from 4 on, over 12"):
        ImageText(300, 12, 299, 9, (3, 4, 4), (0.5,), (0.5,)).open(folder, 0)
