"""The images of a step follow from data, seed and step alone, and what is no such data is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny

from shardwright.io import BadInput
from shardwright_train.data.arrays import ImageForm, Images, open_images
from shardwright_train.data.share import BatchShare
from shardwright_train.data.split import Fractions, Split, SplitPart
from shardwright_train.models.base import family_named

FORM = ImageForm(channels=1, height=2, width=3, classes=8)


def _written(folder: Path, images: int = 8) -> Path:
    """Images whose every pixel is their number, which is their class, too."""
    folder.mkdir(exist_ok=True)
    numbers = np.arange(images)
    np.save(folder / "images.npy", np.broadcast_to(numbers[:, None, None, None], (images, *FORM[:3])).astype(np.uint8))
    np.save(folder / "labels.npy", numbers)
    return folder


def _labels(images: Images, step: int, samples: int) -> list[int]:
    labels: list[int] = images.read((step - 1) * samples, BatchShare(1, samples))["labels"][:, 0].tolist()
    return labels


def test_pixels_lie_between_minus_one_and_one_beside_their_class(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.array([[[[0, 51, 102], [153, 204, 255]]]], np.uint8))
    np.save(tmp_path / "labels.npy", np.array([7], np.uint16))
    batch = open_images(tmp_path, FORM, seed=0).read(0, BatchShare(1, 1))
    assert batch["pixel_values"].dtype == torch.float32
    wanted = torch.tensor([[[[-1.0, -0.6, -0.2], [0.2, 0.6, 1.0]]]])
    torch.testing.assert_close(batch["pixel_values"], wanted, rtol=0, atol=1e-6)
    assert batch["labels"].tolist() == [[7]]
    assert batch["labels"].dtype == torch.int64


def test_every_image_keeps_its_own_class(tmp_path: Path) -> None:
    batch = open_images(_written(tmp_path), FORM, seed=3).read(0, BatchShare(1, 8))
    numbers = ((batch["pixel_values"] + 1) * 127.5).round().long()
    assert (numbers == batch["labels"][:, :, None, None]).all()
    assert batch["pixel_values"].shape == (8, 1, 2, 3)


def test_each_epoch_takes_every_image_once_in_another_order(tmp_path: Path) -> None:
    images = open_images(_written(tmp_path), FORM, seed=0)
    epochs = [_labels(images, step, 8) for step in (1, 2, 3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_that_of_text_and_does_not_change_between_versions(tmp_path: Path) -> None:
    assert _labels(open_images(_written(tmp_path), FORM, seed=7), 1, 8) == [1, 5, 2, 0, 6, 3, 4, 7]


def test_a_batch_may_reach_into_the_next_epoch(tmp_path: Path) -> None:
    images = open_images(_written(tmp_path), FORM, seed=0)
    one_by_one = [_labels(images, step, 1)[0] for step in range(1, 25)]
    assert [label for step in (1, 2) for label in _labels(images, step, 12)] == one_by_one


def test_a_resumed_run_sees_what_an_unbroken_one_sees(tmp_path: Path) -> None:
    _written(tmp_path)
    unbroken = open_images(tmp_path, FORM, seed=0)
    before = [_labels(unbroken, step, 3) for step in range(1, 10)]
    assert _labels(open_images(tmp_path, FORM, seed=0), 7, 3) == before[6]
    assert _labels(open_images(tmp_path, FORM, seed=1), 7, 3) != before[6]


def test_the_images_stay_in_their_file(tmp_path: Path) -> None:
    assert isinstance(open_images(_written(tmp_path), FORM, seed=0).pixels, np.memmap)


def test_the_identity_of_data_is_its_images_and_classes_not_their_place(tmp_path: Path) -> None:
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    identity = open_images(first, FORM, 0).sha256
    assert open_images(second, FORM, 1).sha256 == identity
    np.save(second / "labels.npy", np.arange(8)[::-1])
    assert open_images(second, FORM, 0).sha256 != identity
    pixels = np.load(first / "images.npy")
    pixels[0, 0, 0, 0] += 1
    np.save(first / "images.npy", pixels)
    assert open_images(first, FORM, 0).sha256 != identity


def _of_length(length: int) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({length},)}}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _replaced(array: np.ndarray) -> Callable[[Path], None]:
    return lambda file: np.save(file, array)


REFUSED = {
    "absent images": ("images", Path.unlink, "No such file"),
    "absent labels": ("labels", Path.unlink, "No such file"),
    "truncated images": ("images", _cut_short, "is not a valid array"),
    "truncated labels": ("labels", _cut_short, "is not a valid array"),
    "empty file": ("images", lambda file: file.write_bytes(b""), "is not a valid array"),
    "text": ("images", lambda file: file.write_text("hello " * 50), "is not a valid array"),
    "a header alone": ("labels", lambda file: file.write_bytes(file.read_bytes()[:20]), "is not a valid array"),
    "a damaged header": (
        "labels",
        lambda file: file.write_bytes(file.read_bytes().replace(b"{", b"(")),
        "not a valid array",
    ),
    "a header beyond all bounds": ("labels", lambda file: file.write_bytes(_of_length(10**30)), "not a valid array"),
    "objects": ("labels", _replaced(np.array([None] * 8)), "is not a valid array"),
    "floating pixels": ("images", _replaced(np.zeros((8, 1, 2, 3), np.float32)), r"is float32 \[8, 1, 2, 3\]"),
    "grey images": ("images", _replaced(np.zeros((8, 2, 3), np.uint8)), r"is uint8 \[8, 2, 3\]"),
    "floating labels": ("labels", _replaced(np.zeros(8)), r"is float64 \[8\]"),
    "labels in a column": ("labels", _replaced(np.zeros((8, 1), np.int64)), r"is int64 \[8, 1\]"),
    "unequal lengths": ("labels", _replaced(np.zeros(7, np.int64)), "7 labels for 8 images"),
    "another size": ("images", _replaced(np.zeros((8, 1, 3, 2), np.uint8)), "1 x 3 x 2, the model takes 1 x 2 x 3"),
    "a class too many": ("labels", _replaced(np.arange(1, 9)), "labels from 1 to 8, the model has 8 classes"),
    "a negative class": ("labels", _replaced(np.arange(8) - 1), "labels from -1 to 6, the model has 8 classes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_such_data_is_refused(case: str, tmp_path: Path) -> None:
    name, spoil, words = REFUSED[case]
    file = _written(tmp_path) / f"{name}.npy"
    spoil(file)
    with pytest.raises(BadInput, match=rf"{name}\.npy: .*{words}") as refused:
        open_images(tmp_path, FORM, seed=0)
    assert "\n" not in str(refused.value)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    np.save(_written(tmp_path) / "images.npy", np.zeros((0, 1, 2, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(0, np.int64))
    with pytest.raises(BadInput, match=r"\.npy: "):
        open_images(tmp_path, FORM, seed=0)


def test_a_family_of_images_is_given_images(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((4, 3, 12, 20), np.uint8))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 4]))
    batches = family_named("vit", "test").learns(tiny("vit")).open(tmp_path, seed=0)
    batch = batches.read(0, BatchShare(2, 2))
    assert sorted(batch["labels"][:, 0].tolist()) == [0, 1, 2, 4]
    assert batch["pixel_values"].shape == (4, 3, 12, 20)
    with pytest.raises(BadInput, match=r"labels\.npy: labels from 0 to 4, the model has 4 classes"):
        family_named("vit", "test").learns(tiny("vit", num_labels=4)).open(tmp_path, seed=0)


def test_the_splits_share_out_all_images_whatever_the_seed(tmp_path: Path) -> None:
    _written(tmp_path)
    fractions, seen = Fractions(valid=0.25, test=0.25), []
    for seed in (0, 1):
        opened = [open_images(tmp_path, FORM, seed, SplitPart(split, fractions)) for split in Split]
        assert [images.per_epoch for images in opened] == [4, 2, 2]
        seen.append([_labels(images, 1, images.per_epoch) for images in opened])
        assert sorted(number for split in seen[-1] for number in split) == list(range(8))
    assert seen[0][1:] == seen[1][1:]
    assert sorted(seen[0][0]) == sorted(seen[1][0])
    assert seen[0][0] != seen[1][0]
    with pytest.raises(BadInput, match=r"8 images are too few for the valid split"):
        open_images(tmp_path, FORM, 0, SplitPart(Split.VALID))
