"""A folder of classes, JPEG and PNG files in each, as images.npy and labels.npy: decoded once, not in every step."""

import json
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, atomic_path, write_bytes
from shardwright_launch.lock import only_run
from shardwright_launch.nodes import Nodes

_ENDINGS = (".jpg", ".jpeg", ".png")
_FORMATS = ("JPEG", "PNG")
_AT_ONCE = 256
_SAY_EVERY_S = 10.0


def prepare_images(folder: Path, size: int, out: Path, workers: int | None = None) -> None:
    """Write OUT/{images.npy,labels.npy,classes.json}: the same files and size give the same bytes.

    Each subfolder is a class, numbered from 0 in the order of names. Images become RGB of size x size: scaled
    (bilinear) until they cover it, and cut around their middle. Memory does not grow with their number.

    Raises BadInput where a file is damaged, a class is empty, or Pillow is not installed: then nothing is left.
    """
    check_pillow(folder)
    files_by_class, is_new = _find(folder), not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_run(out.with_name(f"{out.name}.lock"), Nodes()):
        try:
            _write(files_by_class, size, out, workers or len(os.sched_getaffinity(0)))
        except BadInput:
            if is_new and out.is_dir():
                out.rmdir()
            raise
    number = sum(map(len, files_by_class.values()))
    print(f"{number} images of {len(files_by_class)} classes", file=sys.stderr, flush=True)


def check_pillow(folder: Path) -> None:
    """Raise BadInput, naming a folder of images, where nothing can decode them."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        problem, remedy = "decoding images takes the package `pillow`", "pip install 'shardwright-train[images]'"
        raise BadInput(folder, problem, remedy) from None


def _find(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of a folder by class, both in the order of names."""
    if not folder.is_dir():
        raise BadInput(folder, "is no folder", "name one with a folder of images for each class")
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise BadInput(folder, "has no folders of classes", "put the images of each class into one")
    files_by_class = {}
    for each in classes:
        files_by_class[each.name] = sorted(file for file in each.iterdir() if file.suffix.lower() in _ENDINGS)
        if not files_by_class[each.name]:
            raise BadInput(each, "holds no .jpg, .jpeg or .png file", "remove the folder, or fill it")
    return files_by_class


def _write(files_by_class: Mapping[str, list[Path]], size: int, out: Path, workers: int) -> None:
    files = list(chain.from_iterable(files_by_class.values()))
    numbers = np.repeat(np.arange(len(files_by_class)), [len(images) for images in files_by_class.values()])
    with atomic_path(out / "images.npy") as temporary:
        with temporary.open("wb") as file:
            _header(file, "|u1", (len(files), 3, size, size))
            for image in _decoded(files, size, workers):
                file.write(image.tobytes())
        # A folder of before is none any more until both belong together.
        (out / "images.npy").unlink(missing_ok=True)
        with atomic_path(out / "labels.npy") as labels, labels.open("wb") as file:
            _header(file, "<i8", numbers.shape)
            file.write(numbers.astype("<i8").tobytes())
        names = {str(number): name for number, name in enumerate(files_by_class)}
        write_bytes(out / "classes.json", (json.dumps({"id2label": names}, indent=1) + "\n").encode())


def _header(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> None:
    write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})


def _decoded(files: list[Path], size: int, workers: int) -> Iterator[NDArray[np.uint8]]:
    """Yield images [3, size, size] in the order of their files; Pillow decodes without holding the GIL."""
    began = reported_s = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        for first in range(0, len(files), _AT_ONCE):
            some = files[first : first + _AT_ONCE]
            yield from pool.map(fitted_image, some, [size] * len(some))
            done, now = first + len(some), time.monotonic()
            if now - reported_s >= _SAY_EVERY_S:
                reported_s, left_s = now, (len(files) - done) * (now - began) / done
                print(f"{done} of {len(files)} images, {left_s / 60:.0f} min left", file=sys.stderr, flush=True)


def fitted_image(file: Path, size: int) -> NDArray[np.uint8]:
    """Return an image [3, size, size], scaled until it covers the square and cut around its middle.

    Raises BadInput where the file is no whole JPEG or PNG.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=_FORMATS) as opened:
            fitted = ImageOps.fit(opened.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    # Pillow's decoders raise these where a file is cut short, damaged, of another kind, or far too large.
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise BadInput(file, f"is no whole JPEG or PNG ({error})", "replace it, or remove it") from None
    return np.asarray(fitted).transpose(2, 0, 1)
