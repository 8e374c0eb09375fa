"""Folders of images or recordings as arrays that runs read: decoded once, not in every step.

A folder of classes has a subfolder of JPEG and PNG files for each class; a folder of pairs has a text for each image or
recording.
"""

import json
import os
import struct
import sys
import time
import wave
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from shardwright.io import BadInput, atomic_path, read_bytes, write_bytes
from shardwright_train.data.arrays import PLACE, SAMPLES, TOKENS
from shardwright_train.data.tokenizer import Tokenizing, given, library_faults, trained
from shardwright_train.data.tokens import only_writer

_ENDINGS = (".jpg", ".jpeg", ".png")
_FORMATS = ("JPEG", "PNG")
_AT_ONCE = 256
_SAY_EVERY_S = 10.0
HERE = "<image>"
"""Text that marks the place of an image; if a text does not contain it, the image comes first."""
_RATE = 16_000
"""Samples per second of a recording, as Whisper expects them."""
_FRAMES_PER_S = 100


def prepare_images(folder: Path, size: int, out: Path, workers: int | None = None) -> None:
    """Write OUT/{images.npy,labels.npy,classes.json}: the same files and size give the same bytes.

    Each subfolder is a class, numbered from 0 in the order of names. Images become RGB of size x size: scaled
    (bilinear) until they cover the square, and cropped to its centre. Memory does not grow with their number.

    Raises BadInput if a file is damaged, a class is empty, or Pillow is not installed: then no files are left.
    """
    check_pillow(folder)
    files_by_class = _find(folder)
    with only_writer(out):
        _write(files_by_class, size, out, workers)
    number = sum(map(len, files_by_class.values()))
    print(f"{number} images of {len(files_by_class)} classes", file=sys.stderr, flush=True)


def check_pillow(folder: Path) -> None:
    """Raise BadInput, naming a folder of images, if Pillow, which decodes them, is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        problem, remedy = "decoding images needs the package `pillow`", "pip install 'shardwright[images]'"
        raise BadInput(folder, problem, remedy) from None


def _find(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of a folder by class, both in the order of names."""
    if not folder.is_dir():
        raise BadInput(folder, "is not a folder", "pass one with a folder of images for each class")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise BadInput(folder, "has no folders of classes", "put the images of each class into one")
    files_by_class = {}
    for each in classes:
        files_by_class[each.name] = sorted(file for file in each.iterdir() if file.suffix.lower() in _ENDINGS)
        if not files_by_class[each.name]:
            raise BadInput(each, "holds no .jpg, .jpeg or .png file", "remove the folder, or fill it")
    return files_by_class


def _write(files_by_class: Mapping[str, list[Path]], size: int, out: Path, workers: int | None) -> None:
    files = list(chain.from_iterable(files_by_class.values()))
    numbers = np.repeat(np.arange(len(files_by_class)), [len(images) for images in files_by_class.values()])
    with atomic_path(out / "images.npy") as temporary:
        _write_decoded(temporary, "|u1", (3, size, size), files, partial(fitted_image, size=size), workers)
        # Files of an earlier preparation are invalid until both files belong together.
        (out / "images.npy").unlink(missing_ok=True)
        _save(out / "labels.npy", numbers.astype("<i8"))
        names = {str(number): name for number, name in enumerate(files_by_class)}
        write_bytes(out / "classes.json", (json.dumps({"id2label": names}, indent=1) + "\n").encode())


def _write_decoded(
    path: Path,
    dtype: str,
    shape: tuple[int, ...],
    files: Sequence[Path],
    read: Callable[[Path], NDArray[Any]],
    workers: int | None,
) -> None:
    """Write the arrays that `read` returns for each file as one .npy file, a few at a time.

    Pillow decodes without holding the GIL.
    """
    began = reported_s = time.monotonic()
    with path.open("wb") as file, ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (len(files), *shape)})
        for first in range(0, len(files), _AT_ONCE):
            some = files[first : first + _AT_ONCE]
            for each in pool.map(read, some):
                file.write(each.tobytes())
            done, now = first + len(some), time.monotonic()
            if now - reported_s >= _SAY_EVERY_S:
                reported_s, left_s = now, (len(files) - done) * (now - began) / done
                print(f"{done} of {len(files)} files, {left_s / 60:.0f} min left", file=sys.stderr, flush=True)


def _save(path: Path, array: NDArray[Any]) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def fitted_image(file: Path, size: int) -> NDArray[np.uint8]:
    """Return an image [3, size, size], scaled until it covers the square and cropped to its centre.

    Raises BadInput if the file is not a valid JPEG or PNG.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=_FORMATS) as opened:
            fitted = ImageOps.fit(opened.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    # Pillow's decoders raise these if a file is cut short, damaged, of another kind, or far too large.
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise BadInput(file, f"is not a valid JPEG or PNG ({error})", "replace it, or remove it") from None
    return np.asarray(fitted).transpose(2, 0, 1)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of captions.jsonl or transcripts.jsonl."""

    text: str
    image: str | tuple[str, ...] | None = None
    """The file of an image, or several in their order in the text, as paths in the folder."""
    audio: str | None = None
    """The file of a recording, by its path in the folder."""

    @property
    def images(self) -> tuple[str, ...]:
        """Return the files of the line's images."""
        return (self.image,) if self.image and isinstance(self.image, str) else tuple(self.image or ())

    @property
    def inputs(self) -> int:
        """Return the number of the line's images or recordings."""
        return len(self.images) + (self.audio is not None)


class Tokens(NamedTuple):
    """The source of the texts' tokenizer: a model's folder, or a vocabulary to train."""

    folder: Path | None
    vocab_size: int | None

    def tokenizing(self, texts: Sequence[str], source: Path) -> Tokenizing:
        """Return the tokenizer; raise BadInput unless exactly one of vocabulary size and folder is given."""
        if (self.folder is None) == (self.vocab_size is None):
            problem = "it needs either --vocab-size or --tokenizer"
            raise BadInput("prepare", problem, "train a tokenizer, or pass a model's")
        return given(self.folder) if self.folder else trained(iter(texts), self.vocab_size or 0, str(source))


def prepare_captions(folder: Path, size: int, out: Path, tokens: Tokens, workers: int | None = None) -> None:
    """Write OUT/{images.npy,tokens.npy,samples.npy,tokenizer.json} from a folder with captions.jsonl.

    Images are scaled and cropped like images of classes. `<image>` in a text marks the place of an image; a line
    without an image is text only. Raises BadInput if a file is damaged or a line is malformed: then no files are left.
    """
    check_pillow(folder)
    listing = folder / "captions.jsonl"
    lines = [_placed(line, listing, number) for number, line in _lines(listing, "audio")]
    files = [_inside(folder, name, listing) for line in lines for name in line.images]
    image = partial(fitted_image, size=size)
    _prepare(lines, files, image, ("images.npy", "|u1", (3, size, size)), out, tokens, listing, workers)


def prepare_speech(folder: Path, bins: int, seconds: int, out: Path, tokens: Tokens, workers: int | None) -> None:
    """Write OUT/{features.npy,tokens.npy,samples.npy,tokenizer.json} from a folder with transcripts.jsonl.

    Recordings are WAV files of 16 kHz and of at most `seconds` s; spectrograms have `bins` frequencies. Raises BadInput
    if a file is damaged or a line is malformed: then no files are left.
    """
    from transformers import WhisperFeatureExtractor

    listing = folder / "transcripts.jsonl"
    lines = [line for _, line in _lines(listing, "image")]
    if silent := next((number for number, line in enumerate(lines, 1) if not line.audio), None):
        raise BadInput(listing, f"line {silent} has no recording", "give its file as `audio`")
    files = [_inside(folder, line.audio or "", listing) for line in lines]
    extractor: Any = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)  # type: ignore[no-untyped-call]

    def spectrogram(file: Path) -> NDArray[Any]:
        sound = _sound(file, seconds)
        made: NDArray[Any] = extractor(sound, sampling_rate=_RATE, return_tensors="np")["input_features"][0]
        return made.astype("<f4")

    shape = (bins, seconds * _FRAMES_PER_S)
    _prepare(lines, files, spectrogram, ("features.npy", "<f4", shape), out, tokens, listing, workers)


def _lines(listing: Path, other: str) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a listing with their numbers.

    Raises BadInput for a malformed line, or a line with the field `other`, which does not belong in this listing.
    """
    decoder = msgspec.json.Decoder(Line)
    texts = read_bytes(listing).splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(listing, f"line {number} is not a sample ({error})", "correct it, or remove it") from None
        if getattr(line, other) is not None:
            raise BadInput(listing, f"line {number} names {other}", "leave it out")
        yield number, line
    if not texts:
        raise BadInput(listing, "is empty", "write a line for each sample")


def _placed(line: Line, listing: Path, number: int) -> Line:
    """Return the line with a placeholder for each image in its text; raise BadInput if it has too few or too many."""
    places, images = line.text.count(HERE), len(line.images)
    if places not in (images, 0):
        problem = f"line {number} has {places} places for its {images} images"
        raise BadInput(listing, problem, f"write {HERE} once for each image")
    return line if places else msgspec.structs.replace(line, text=HERE * images + line.text)


def _inside(folder: Path, name: str, listing: Path) -> Path:
    if "\0" in name:
        raise BadInput(listing, f"refers to {name!r}, which does not exist", "fix the listing")
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise BadInput(listing, f"refers to {name}, which is outside its folder", "put the file there")
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
    """Write the arrays of samples; `form`: file name, format and shape of what `read` returns."""
    tokenizing = tokens.tokenizing([line.text.replace(HERE, "") for line in lines], listing)
    texts = [_encoded(line, tokenizing, listing) for line in lines]
    counts = np.array([len(text) for text in texts], np.int64)
    inputs = np.array([line.inputs for line in lines], np.int64)
    placed = np.where(inputs > 0, np.cumsum(inputs) - inputs, -1)
    samples = np.stack((np.cumsum(counts) - counts, counts, placed), 1)
    with only_writer(out):
        # Files of an earlier preparation are invalid until all files belong together.
        (out / SAMPLES).unlink(missing_ok=True)
        with atomic_path(out / form[0]) as temporary:
            _write_decoded(temporary, *form[1:], files, read, workers)
        tokenizing.write(out)
        _save(out / TOKENS, np.concatenate(texts))
        _save(out / SAMPLES, samples)
    said = {"samples": len(lines), form[0].removesuffix(".npy"): len(files), "tokens": int(counts.sum())}
    print(json.dumps(said)[1:-1].replace('"', ""), file=sys.stderr, flush=True)


def _encoded(line: Line, tokenizing: Tokenizing, listing: Path) -> NDArray[np.int32]:
    """Return the tokens of a text with the tokenizer's prefix and suffix, and placeholders for its images.

    If a recording's text begins with a special token that names its task, such as <|en|>, the prefix is left out.
    """
    before, *behind = (_tokens(part, tokenizing, listing) for part in line.text.split(HERE))
    named = tokenizing.tokenizer.get_added_tokens_decoder()
    names_task = line.audio is not None and bool(before) and before[0] in named and named[before[0]].special
    parts = [*(() if names_task else tokenizing.ends.before), *before]
    for part in behind:
        parts += [PLACE, *part]
    return np.array([*parts, *tokenizing.ends.after], np.int32)


def _tokens(text: str, tokenizing: Tokenizing, listing: Path) -> list[int]:
    with library_faults(listing, "has a text that the tokenizer cannot encode", "use another tokenizer"):
        ids: list[int] = tokenizing.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _sound(file: Path, seconds: int) -> NDArray[np.float32]:
    """Return a recording in [-1, 1), averaged over channels; raise BadInput unless it is a WAV file as expected."""
    try:
        with wave.open(str(file), "rb") as opened:
            form = opened.getparams()
            content = opened.readframes(form.nframes)
    except (OSError, EOFError, wave.Error) as error:
        raise BadInput(file, f"is not a valid WAV file ({error})", "write it with 16 bits a sample") from None
    if form.sampwidth != 2 or form.framerate != _RATE:
        problem = f"has {8 * form.sampwidth} bits a sample and {form.framerate} samples/s"
        raise BadInput(file, problem, f"convert it to 16 bits and {_RATE} samples/s")
    if form.nframes > seconds * _RATE:
        problem = f"is {form.nframes / _RATE:.1f} s long, which exceeds {seconds} s"
        raise BadInput(file, problem, "cut it, or pass a larger --seconds")
    if len(content) != 2 * form.nframes * form.nchannels or not form.nframes:
        raise BadInput(file, "ends before its samples do", "replace it, or remove it")
    samples = np.frombuffer(content, "<i2")
    mean: NDArray[np.float32] = (samples.reshape(-1, form.nchannels).mean(1) / 2**15).astype(np.float32)
    return mean
