"""A folder of images or recordings with a text for each, as arrays that `pairs` reads: made once, not in every step."""

import json
import os
import sys
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, atomic_path, read_bytes
from shardwright_launch.lock import only_run
from shardwright_launch.nodes import Nodes
from shardwright_train.data.image_folder import check_pillow, fitted_image
from shardwright_train.data.pairs import PLACE, SAMPLES, TOKENS
from shardwright_train.data.tokenizing import TOKENIZER, Tokenizing, given, trained

HERE = "<image>"
"""The text that stands in the place of an image; a text without it begins with the image."""
_RATE = 16_000
"""Samples of a recording in a second, as Whisper takes them."""
_FRAMES_PER_S = 100


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of captions.jsonl or transcripts.jsonl."""

    text: str
    image: str | tuple[str, ...] | None = None
    """The file of an image, or those of several in their order in the text, by their paths in the folder."""
    audio: str | None = None
    """The file of a recording, by its path in the folder."""

    @property
    def images(self) -> tuple[str, ...]:
        """Return the files of its images."""
        return (self.image,) if self.image and isinstance(self.image, str) else tuple(self.image or ())

    @property
    def inputs(self) -> int:
        """Return the number of its images or recordings."""
        return len(self.images) + (self.audio is not None)


class Tokens(NamedTuple):
    """Where the tokenizer of the texts comes from: a model's folder, or a vocabulary to train."""

    folder: Path | None
    vocab_size: int | None

    def tokenizing(self, texts: Sequence[str], source: Path) -> Tokenizing:
        """Return the tokenizer; raise BadInput where not one of both is given."""
        if (self.folder is None) == (self.vocab_size is None):
            problem = "it takes either --vocab-size or --tokenizer"
            raise BadInput("prepare", problem, "train a tokenizer, or name a model's")
        return given(self.folder) if self.folder else trained(iter(texts), self.vocab_size or 0, str(source))


def prepare_captions(folder: Path, size: int, out: Path, tokens: Tokens, workers: int | None = None) -> None:
    """Write OUT/{images.npy,tokens.npy,samples.npy,tokenizer.json} of a folder with captions.jsonl.

    Images become as those of classes do. `<image>` in a text is where an image stands; a line without an image is a
    text alone. Raises BadInput where a file is damaged or a line is none: then nothing is left.
    """
    check_pillow(folder)
    listing = folder / "captions.jsonl"
    lines = [_placed(line, listing, number) for number, line in _lines(listing, "audio")]
    files = [_inside(folder, name, listing) for line in lines for name in line.images]

    def image(file: Path) -> NDArray[Any]:
        return fitted_image(file, size)

    _prepare(lines, files, image, ("images.npy", "|u1", (3, size, size)), out, tokens, listing, workers)


def prepare_speech(folder: Path, bins: int, seconds: int, out: Path, tokens: Tokens, workers: int | None) -> None:
    """Write OUT/{features.npy,tokens.npy,samples.npy,tokenizer.json} of a folder with transcripts.jsonl.

    Recordings are WAV files of 16 kHz, of at most so many s. Raises BadInput where a file is damaged or a line is none:
    then nothing is left.
    """
    from transformers import WhisperFeatureExtractor

    listing = folder / "transcripts.jsonl"
    lines = [line for _, line in _lines(listing, "image")]
    if silent := next((number for number, line in enumerate(lines, 1) if not line.audio), None):
        raise BadInput(listing, f"line {silent} names no recording", "name its file with audio")
    files = [_inside(folder, line.audio or "", listing) for line in lines]
    extractor: Any = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)  # type: ignore[no-untyped-call]

    def spectrogram(file: Path) -> NDArray[Any]:
        sound = _sound(file, seconds)
        made: NDArray[Any] = extractor(sound, sampling_rate=_RATE, return_tensors="np")["input_features"][0]
        return made.astype("<f4")

    shape = (bins, seconds * _FRAMES_PER_S)
    _prepare(lines, files, spectrogram, ("features.npy", "<f4", shape), out, tokens, listing, workers)


def _lines(listing: Path, other: str) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a listing with their numbers; raise BadInput for one that is none, or names an `other`."""
    decoder = msgspec.json.Decoder(Line)
    texts = read_bytes(listing).splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(listing, f"line {number} is no sample ({error})", "correct it, or remove it") from None
        if getattr(line, other) is not None:
            raise BadInput(listing, f"line {number} names {other}", "leave it out")
        yield number, line
    if not texts:
        raise BadInput(listing, "holds no line", "write one for each sample")


def _placed(line: Line, listing: Path, number: int) -> Line:
    """Return a line whose text has a place for each image; raise BadInput where it has others."""
    places, images = line.text.count(HERE), len(line.images)
    if places not in (images, 0):
        problem = f"line {number} has {places} places for its {images} images"
        raise BadInput(listing, problem, f"write {HERE} once for each image")
    return line if places else msgspec.structs.replace(line, text=HERE * images + line.text)


def _inside(folder: Path, name: str, listing: Path) -> Path:
    if "\0" in name:
        raise BadInput(listing, f"names {name!r}, which no file is named", "correct it")
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise BadInput(listing, f"names {name}, which lies outside of its folder", "put the file there")
    return file


def _prepare(
    lines: Sequence[Line],
    files: Sequence[Path],
    read: Callable[[Path], NDArray[Any]],
    form: tuple[str, str, tuple[int, ...]],
    out: Path,
    tokens: Tokens,
    listing: Path,
    workers: int | None,
) -> None:
    """Write the arrays of samples; `form`: the file of what is read, its format and the shape of one."""
    tokenizing = tokens.tokenizing([line.text.replace(HERE, "") for line in lines], listing)
    is_new = not out.exists()
    texts = [_encoded(line.text, tokenizing) for line in lines]
    counts = np.array([len(text) for text in texts], np.int64)
    inputs = np.array([line.inputs for line in lines], np.int64)
    placed = np.where(inputs > 0, np.cumsum(inputs) - inputs, -1)
    samples = np.stack((np.cumsum(counts) - counts, counts, placed), 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_run(out.with_name(f"{out.name}.lock"), Nodes()):
        try:
            # A folder of before is none any more until all belong together.
            (out / SAMPLES).unlink(missing_ok=True)
            with atomic_path(out / form[0]) as temporary, temporary.open("wb") as file:
                write_array_header_1_0(
                    file, {"descr": form[1], "fortran_order": False, "shape": (len(files), *form[2])}
                )
                with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
                    for each in pool.map(read, files):
                        file.write(each.tobytes())
        except BadInput:
            if is_new and out.is_dir():
                out.rmdir()
            raise
        tokenizing.write(out / TOKENIZER)
        for name, array in ((TOKENS, np.concatenate(texts)), (SAMPLES, samples)):
            with atomic_path(out / name) as temporary, temporary.open("wb") as file:
                np.save(file, array)
    said = {"samples": len(lines), form[0].removesuffix(".npy"): len(files), "tokens": int(counts.sum())}
    print(json.dumps(said)[1:-1].replace('"', ""), file=sys.stderr, flush=True)


def _encoded(text: str, tokenizing: Tokenizing) -> NDArray[np.int32]:
    """Return the tokens of a text, closed by the token that ends one, with the place of its image."""
    before, *behind = text.split(HERE)
    parts: list[int] = tokenizing.tokenizer.encode(before).ids
    for part in behind:
        parts = [*parts, PLACE, *tokenizing.tokenizer.encode(part, add_special_tokens=False).ids]
    return np.array([*parts, tokenizing.end], np.int32)


def _sound(file: Path, seconds: int) -> NDArray[np.float32]:
    """Return a recording in [-1, 1), its channels' mean; raise BadInput where it is no such WAV file."""
    try:
        with wave.open(str(file), "rb") as opened:
            form = opened.getparams()
            content = opened.readframes(form.nframes)
    except (OSError, EOFError, wave.Error) as error:
        raise BadInput(file, f"is no whole WAV file ({error})", "write it with 16 bits a sample") from None
    if form.sampwidth != 2 or form.framerate != _RATE:
        problem = f"has {8 * form.sampwidth} bits a sample and {form.framerate} samples/s"
        raise BadInput(file, problem, f"convert it to 16 bits and {_RATE} samples/s")
    if form.nframes > seconds * _RATE:
        problem = f"is {form.nframes / _RATE:.1f} s long, over {seconds} s"
        raise BadInput(file, problem, "cut it, or give another --seconds")
    if len(content) != 2 * form.nframes * form.nchannels or not form.nframes:
        raise BadInput(file, "ends before its samples do", "replace it, or remove it")
    samples = np.frombuffer(content, "<i2")
    mean: NDArray[np.float32] = (samples.reshape(-1, form.nchannels).mean(1) / 2**15).astype(np.float32)
    return mean
