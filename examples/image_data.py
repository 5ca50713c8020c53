"""Images and labels by the name of the data set, all as float32 [3, size, size] around zero.

The small ones stay in memory as they come, uint8 and unscaled: with 16 ranks on one machine every
copy counts 16 times.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import BadInput, one_line
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision import datasets, transforms

from ddl.workloads.digits import read_digits
from ddl.workloads.idx import FASHION_MNIST_DIR, read_labelled

CIFAR10_DIR = Path("data/cifar10")
IMAGENET_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class ImageData:
    """What to train on and what to be judged by; both give (float32 [3, size, size], int label)."""

    train: Any  # a torch Dataset with a length, for which torch has no type
    val: Any


class SmallImages(Dataset):
    """Images kept as uint8 [N, h, w]; scaled to float32 [3, size, size] one at a time."""

    def __init__(self, images: Tensor, labels: Tensor, size: int) -> None:
        self.images, self.labels, self.size = images, labels.tolist(), size

    def __len__(self) -> int:  # noqa: D105
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # noqa: D105
        grey = self.images[index].float() / 127.5 - 1.0
        scaled = interpolate(grey[None, None], size=(self.size, self.size), mode="bilinear")
        return scaled[0].expand(3, -1, -1), self.labels[index]


class RandomImages(Dataset):
    """Noise of the shape of a data set, made once, so that a loader costs nothing."""

    def __init__(self, length: int, classes: int, size: int) -> None:
        self.images = torch.randn(64, 3, size, size, generator=torch.Generator().manual_seed(0))
        self.length, self.classes = length, classes

    def __len__(self) -> int:  # noqa: D105
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # noqa: D105
        return self.images[index % len(self.images)], index % self.classes


def count_classes(args: Namespace) -> int:
    """How many classes the chosen data set has; for imagefolder the sub-folders of --train-dir.

    Raises:
        BadInput: --train-dir is not a folder of folders.
    """
    if args.dataset != "imagefolder":
        return 10
    if args.synthetic:
        return 1000
    if not args.train_dir.is_dir():
        raise BadInput(f"--train-dir {args.train_dir} is not a folder; give the folder of classes")
    classes = sum(path.is_dir() for path in args.train_dir.iterdir())
    if classes == 0:
        raise BadInput(
            f"--train-dir {args.train_dir} has no sub-folders, expected one per class; "
            "move the images of each class into a folder of its own"
        )
    return classes


def load_data(args: Namespace, size: int) -> ImageData:
    """The data set that the arguments name, at `size` x `size` pixels.

    Raises:
        BadInput: a folder or a file is missing or broken.
    """
    if args.synthetic:
        return _synthetic(args, size)
    if args.dataset == "digits":
        return _digits(size)
    if args.dataset == "fashion-mnist":
        return _fashion_mnist(args.data_dir or FASHION_MNIST_DIR, size)
    if args.dataset == "cifar10":
        return _cifar10(args.data_dir or CIFAR10_DIR, args.download, size)
    return _image_folders(args.train_dir, args.val_dir, size)


def _synthetic(args: Namespace, size: int) -> ImageData:
    lengths = {
        "digits": (1437, 360),
        "fashion-mnist": (60_000, 10_000),
        "cifar10": (50_000, 10_000),
        "imagefolder": (1_281_167, 50_000),
    }
    train, val = lengths[args.dataset]
    classes = count_classes(args)
    return ImageData(RandomImages(train, classes, size), RandomImages(val, classes, size))


def _digits(size: int) -> ImageData:
    """The 1,797 handwritten digits of 8x8 pixels in scikit-learn; one in five is for validation."""
    try:
        images, labels = read_digits()
    except ValueError as error:
        raise BadInput(f"--dataset digits: {error}") from error
    # They are sorted by writer. The split is the same for every --seed, so that runs compare.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return ImageData(
        SmallImages(images[train], labels[train], size), SmallImages(images[val], labels[val], size)
    )


def _fashion_mnist(folder: Path, size: int) -> ImageData:
    try:
        parts = [read_labelled(folder, prefix) for prefix in ("train", "t10k")]
    except ValueError as error:
        raise BadInput(str(error)) from error
    return ImageData(*(SmallImages(images, labels, size) for images, labels in parts))


def _cifar10(folder: Path, download: bool, size: int) -> ImageData:
    resize = [] if size == 32 else [transforms.Resize((size, size))]
    plain = [*resize, transforms.ToTensor(), transforms.Normalize(CIFAR10_MEAN, CIFAR10_STD)]
    shaken = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *plain]
    try:
        return ImageData(
            datasets.CIFAR10(folder, True, transforms.Compose(shaken), download=download),
            datasets.CIFAR10(folder, False, transforms.Compose(plain)),
        )
    except (RuntimeError, OSError) as error:
        raise BadInput(
            f"no CIFAR-10 in {folder} ({one_line(error)}); unpack cifar-10-python.tar.gz of "
            "https://www.cs.toronto.edu/~kriz/cifar.html there, point --data-dir at where it is, "
            "or add --download to fetch it"
        ) from error


def _image_folders(train_dir: Path, val_dir: Path, size: int) -> ImageData:
    normalize = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    shaken = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    # ImageNet's custom: scale the short side to 256, cut 224 out of the middle.
    plain = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    parts = []
    for flag, folder, steps in (("--train-dir", train_dir, shaken), ("--val-dir", val_dir, plain)):
        transform = transforms.Compose([*steps, transforms.ToTensor(), normalize])
        try:
            parts.append(datasets.ImageFolder(folder, transform))
        except OSError as error:
            raise BadInput(
                f"{flag} {folder}: {one_line(error)}; expected one sub-folder of images per class"
            ) from error
    train, val = parts
    if train.classes != val.classes:
        differing = sorted(set(train.classes) ^ set(val.classes))
        raise BadInput(
            f"--train-dir and --val-dir differ in their classes: {', '.join(differing[:3])} in "
            "only one of them; both need the same sub-folders"
        )
    return ImageData(train, val)
