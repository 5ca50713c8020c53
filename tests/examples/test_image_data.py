import gzip
import struct
from argparse import Namespace

import pytest
import torch
from arguments import BadInput, parse_arguments
from image_data import SmallImages, count_classes, load_data
from PIL import Image

from ddl.workloads.idx import read_idx


def arguments(*extra: object) -> Namespace:
    return parse_arguments([str(argument) for argument in extra])


def idx(shape: tuple[int, ...], data: bytes, type_code: int = 8) -> bytes:
    return bytes((0, 0, type_code, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + data


def test_digits_are_split_without_overlap():
    data = load_data(arguments(), 32)
    assert (len(data.train), len(data.val)) == (1437, 360)
    seen = {image.numpy().tobytes() for image in data.train.images}
    repeated = sum(image.numpy().tobytes() in seen for image in data.val.images)
    assert repeated == 0


def test_digits_have_the_promised_shape_and_range():
    data = load_data(arguments(), 32)
    image, label = data.train[0]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert isinstance(label, int)
    assert data.train.images.min() == 0 and data.train.images.max() == 255
    assert -1.0 <= image.min() < -0.9 and 0.5 < image.max() <= 1.0
    assert sorted(set(data.train.labels)) == list(range(10)) == sorted(set(data.val.labels))


def test_digits_do_not_depend_on_the_seed():
    one, two = load_data(arguments("--seed", 1), 32), load_data(arguments("--seed", 2), 32)
    assert torch.equal(one.train.images, two.train.images)
    assert one.val.labels == two.val.labels


def test_scaling_keeps_a_plain_image_plain():
    images = SmallImages(torch.full((1, 8, 8), 255, dtype=torch.uint8), torch.tensor([3]), 24)
    image, label = images[0]
    assert torch.equal(image, torch.ones(3, 24, 24))
    assert label == 3


@pytest.mark.parametrize("packed", [False, True])
def test_read_idx_reads_plain_and_gzip(tmp_path, packed):
    content = idx((2, 3, 4), bytes(range(24)))
    if packed:
        (tmp_path / "images.gz").write_bytes(gzip.compress(content))
    else:
        (tmp_path / "images").write_bytes(content)
    tensor = read_idx(tmp_path / "images", dimensions=3)
    assert torch.equal(tensor, torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GIF89a, not an idx file", ["47494638", "00000803"]),
        (b"", ["00000803"]),
        (idx((2, 2, 2), bytes(8))[:9], ["starts with", "00000803"]),
        (idx((8,), bytes(8)), ["00000801", "00000803"]),
        (idx((2, 2, 2), bytes(32), type_code=0x0C), ["00000c03", "00000803"]),
        (idx((2, 2, 2), bytes(7)), ["7 bytes", "promises 8"]),
        (idx((2, 2, 2), bytes(9)), ["9 bytes", "promises 8"]),
    ],
)
def test_broken_idx_files_are_told_apart(tmp_path, content, words):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_idx(path, dimensions=3)
    for word in [str(path), "fetch the file anew", *words]:
        assert word in str(caught.value)


def test_a_truncated_gzip_file_is_named(tmp_path):
    (tmp_path / "images.gz").write_bytes(gzip.compress(idx((4, 4, 4), bytes(64)))[:-12])
    with pytest.raises(ValueError, match=r"images\.gz.*fetch the file anew"):
        read_idx(tmp_path / "images", dimensions=3)


def test_fashion_mnist_is_read_from_idx_files(tmp_path):
    for prefix, length in (("train", 6), ("t10k", 4)):
        images = idx((length, 28, 28), bytes(length * 784))
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx((length,), bytes(range(length))))
    data = load_data(arguments("--dataset", "fashion-mnist", "--data-dir", tmp_path), 64)
    assert (len(data.train), len(data.val)) == (6, 4)
    image, label = data.train[5]
    assert image.shape == (3, 64, 64)
    assert label == 5


def test_fashion_mnist_with_fewer_labels_than_images(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx((2, 2, 2), bytes(8)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx((1,), bytes(1)))
    with pytest.raises(BadInput, match="2 images but 1 labels"):
        load_data(arguments("--dataset", "fashion-mnist", "--data-dir", tmp_path), 32)


def test_missing_folders_are_named_with_a_cure(tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(BadInput, match=r"nowhere.*apt-get install dataset-fashion-mnist"):
        load_data(arguments("--dataset", "fashion-mnist", "--data-dir", missing), 32)
    with pytest.raises(BadInput, match=r"train-images.*--data-dir"):
        load_data(arguments("--dataset", "fashion-mnist", "--data-dir", tmp_path), 32)
    with pytest.raises(BadInput, match=r"nowhere.*--download"):
        load_data(arguments("--dataset", "cifar10", "--data-dir", missing), 32)
    assert not missing.exists()


def write_classes(folder, *classes: str):
    for name in classes:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (50, 40)).save(folder / name / "black.png")
    return folder


def folders(train, val) -> Namespace:
    return arguments("--dataset", "imagefolder", "--train-dir", train, "--val-dir", val)


def test_image_folders_give_crops_of_the_size(tmp_path):
    train = write_classes(tmp_path / "train", "cat", "dog")
    val = write_classes(tmp_path / "val", "cat", "dog")
    args = folders(train, val)
    assert count_classes(args) == 2
    data = load_data(args, 32)
    for image, label in (data.train[1], data.val[1]):
        assert image.shape == (3, 32, 32)
        assert label == 1


def test_bad_image_folders(tmp_path):
    train = write_classes(tmp_path / "train", "cat", "dog")
    with pytest.raises(BadInput, match=r"--train-dir .*nowhere is not a folder"):
        count_classes(folders(tmp_path / "nowhere", train))
    with pytest.raises(BadInput, match="no sub-folders"):
        count_classes(folders(train / "cat", train))
    with pytest.raises(BadInput, match="--val-dir"):
        load_data(folders(train, tmp_path / "nowhere"), 32)
    with pytest.raises(BadInput, match="differ in their classes: cow, dog"):
        load_data(folders(train, write_classes(tmp_path / "val", "cat", "cow")), 32)
    with pytest.raises(BadInput, match="--val-dir"):  # a class without images
        (tmp_path / "empty" / "cat").mkdir(parents=True)
        load_data(folders(train, tmp_path / "empty"), 32)


@pytest.mark.parametrize("dataset", ["digits", "imagefolder"])
def test_synthetic_data_has_the_shape_of_the_data_set(dataset):
    args = arguments("--dataset", dataset, "--synthetic")
    data = load_data(args, 48)
    image, label = data.train[len(data.train) - 1]
    assert image.shape == (3, 48, 48)
    assert 0 <= label < count_classes(args)
