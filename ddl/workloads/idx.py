"""Reads idx files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
UNSIGNED_BYTES = 0x08  # the type code of an idx file


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of unsigned bytes, plain or as `path`.gz: magic, big-endian sizes, bytes.

    Returns:
        uint8, with as many dimensions as asked for.

    Raises:
        ValueError: there is no such file, or it is something else, or cut off.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"no file {path} or {packed.name}, expected an idx file; give its folder as --data-dir"
        ) from error
    except (OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read {packed}: {reason}; fetch the file anew") from error

    magic, expected = content[:4], bytes((0, 0, UNSIGNED_BYTES, dimensions))
    start = 4 + 4 * dimensions
    if magic != expected or len(content) < start:
        raise ValueError(
            f"{path} starts with bytes {magic.hex()}, expected {expected.hex()} for an idx file of "
            f"{dimensions} dimensions; fetch the file anew"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - start} bytes of data, its header promises "
            f"{math.prod(shape)}; fetch the file anew"
        )
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return data[start:].view(shape)


def read_labelled(folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    """Read the images and labels of one part of a data set of MNIST's layout.

    Args:
        folder: where the files are.
        prefix: "train" or "t10k".

    Returns:
        uint8 [N, h, w] and uint8 [N].

    Raises:
        ValueError: the folder or a file is missing or broken, or the two do not fit together.
    """
    if not folder.is_dir():
        raise ValueError(
            f"--data-dir {folder} is not a folder, expected the idx files of Fashion-MNIST; "
            "run: apt-get install dataset-fashion-mnist"
        )
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{folder}: {len(images)} images but {len(labels)} labels in the files {prefix}-*, "
            "expected as many of both; fetch the files anew"
        )
    return images, labels
