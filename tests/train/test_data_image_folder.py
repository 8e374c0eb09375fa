"""A folder of classes becomes the arrays that a run of ViT reads, or one line that says what is wrong with it."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_calls import call
from PIL import Image

from shardwright_train.cli import APP
from shardwright_train.data.arrays import ImageForm, open_images


def _folder(folder: Path) -> Path:
    """Two classes: PNG files, one of them a JPEG, of unlike sizes, each of one colour; and a file that is no image."""
    for name, kind, colour, size in (
        ("b dogs/1.png", "PNG", (200, 10, 0), (4, 4)),
        ("b dogs/2.jpeg", "JPEG", (60, 60, 60), (16, 8)),
        ("a cats/9.PNG", "PNG", (0, 100, 255), (3, 7)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(folder / name, kind)
    (folder / "a cats" / "notes.txt").write_text("no image")
    return folder


def _prepare(folder: Path, *options: str) -> tuple[int, str]:
    asked = ("--text", str(folder / "photos"), "--source", "images", "--out", str(folder / "data"), *options)
    ended = call(APP, "prepare", *asked)
    return ended.exit_code, ended.stderr


def test_a_folder_of_classes_becomes_arrays_that_a_run_reads(tmp_path: Path) -> None:
    _folder(tmp_path / "photos")
    assert _prepare(tmp_path, "--image-size", "4") == (0, "3 images of 2 classes\n")
    pixels, labels = (np.load(tmp_path / "data" / f"{name}.npy") for name in ("images", "labels"))
    assert (pixels.dtype, pixels.shape, labels.tolist()) == (np.uint8, (3, 3, 4, 4), [0, 1, 1])
    assert pixels[:, :, 0, 0].tolist() == [[0, 100, 255], [200, 10, 0], [60, 60, 60]]
    assert (pixels == pixels[:, :, :1, :1]).all()
    names = json.loads((tmp_path / "data" / "classes.json").read_text())["id2label"]
    assert names == {"0": "a cats", "1": "b dogs"}
    assert open_images(tmp_path / "data", ImageForm(3, 4, 4, 2), 0).per_epoch == 3
    before = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()}
    assert set(before) == {"images.npy", "labels.npy", "classes.json"}
    assert _prepare(tmp_path, "--image-size", "4", "--workers", "1")[0] == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()} == before


def test_an_image_is_scaled_until_it_covers_the_square_and_cut_around_its_middle(tmp_path: Path) -> None:
    (tmp_path / "photos" / "x").mkdir(parents=True)
    columns = np.repeat([[0, 50, 100, 150]], 2, 0).astype(np.uint8)
    Image.fromarray(columns).save(tmp_path / "photos" / "x" / "1.png")
    assert _prepare(tmp_path, "--image-size", "2")[0] == 0
    assert np.load(tmp_path / "data" / "images.npy")[0].tolist() == [[[50, 100]] * 2] * 3


@pytest.mark.parametrize("kept", [0, 30, 45])
def test_a_damaged_image_is_one_line_and_leaves_nothing(kept: int, tmp_path: Path) -> None:
    file = _folder(tmp_path / "photos") / "b dogs" / "1.png"
    file.write_bytes(file.read_bytes()[:kept])
    status, said = _prepare(tmp_path, "--image-size", "4")
    assert (status, said.count("\n")) == (2, 1)
    assert f"error: {file}: is not a valid JPEG or PNG (" in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "--image-size: is missing"),
        (("--image-size", "4", "--vocab-size", "300"), "--vocab-size: images have no tokens"),
    ],
)
def test_options_that_do_not_fit_images_are_refused(options: tuple[str, ...], what: str, tmp_path: Path) -> None:
    _folder(tmp_path / "photos")
    status, said = _prepare(tmp_path, *options)
    assert (status, said.count("\n")) == (2, 1) and what in said


def test_a_folder_without_classes_an_empty_class_and_a_size_for_a_text_are_refused(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    assert "is not a folder" in _prepare(tmp_path, "--image-size", "4")[1]
    photos.mkdir()
    assert "has no folders of classes" in _prepare(tmp_path, "--image-size", "4")[1]
    (photos / "empty").mkdir()
    assert "empty: holds no .jpg" in _prepare(tmp_path, "--image-size", "4")[1]
    (photos / "a.txt").write_text("text")
    asked = ("--text", str(photos), "--out", str(tmp_path / "data"), "--vocab-size", "300", "--image-size", "4")
    assert "--image-size: applies only to images" in call(APP, "prepare", *asked).stderr
