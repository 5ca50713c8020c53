"""A checkpoint on disk: a folder that is complete, or is not there.

    directory/
        0007-step-600/
            manifest.json   format version, P, where training stood; size and SHA-256 of each file
            job.pt          what all ranks have in common
            rank-0.pt ...   what each rank has to itself

A new one is written aside, in `.saving-0008`, which is renamed when all of it is on the disk. The
number in front grows from save to save, so the newest is known without a clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl.errors import DDLError, NoCheckpointError

logger = logging.getLogger(__name__)

FORMAT, VERSION = "ddl checkpoint", 1
MANIFEST, JOB = "manifest.json", "job.pt"
NAME = re.compile(r"(\d+)-step-\d+")
EXPECTED = "expected a folder that ddl.save_checkpoint wrote"
ANOTHER = "load an older one by its own path"
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def shard(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank-{rank}.pt"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        P: number of ranks that wrote it.
        epoch, step, position: where training stood.
        files: size in bytes and SHA-256 of each file, by its name.
    """

    P: int
    epoch: int
    step: int
    position: int
    files: Mapping[str, tuple[int, str]]


# Write.


def open_aside(directory: Path) -> Path:
    """A new folder to write into, in `directory`; removes what a killed save has left."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(".saving-*"):
        shutil.rmtree(left)
    aside = directory / f".saving-{1 + max((n for n, _ in _numbered(directory)), default=0):04d}"
    aside.mkdir()
    return aside


def write(path: Path, content: Any) -> tuple[int, str]:
    """Bring plain content to the disk; returns the size and SHA-256 of the file."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size, _sha256(path)


def commit(aside: Path, manifest: Manifest, keep: int | None) -> Path:
    """Give a folder that is written its name; from then on it exists.

    Args:
        aside: from `open_aside`, with all files of the manifest.
        manifest: what to say of it.
        keep: how many of the newest to keep, this one included; None for all.
    """
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1)
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(aside)
    number = aside.name.removeprefix(".saving-")
    folder = aside.with_name(f"{number}-step-{manifest.step}")
    aside.rename(folder)
    _sync_folder(folder.parent)
    if keep is not None:
        for _, old in _numbered(folder.parent)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)  # the new one is there in any case
    return folder


def plain(value: Any, where: str) -> Any:
    """The same content without what `torch.load(weights_only=True)` refuses; tensors on the CPU.

    Raises:
        ValueError: there is something else in it; names the place.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        # A view would bring all of what it is a view of into the file.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()
    if type(value) in PLAIN:
        return value
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)((key, plain(entry, f"{where}[{key!r}]")) for key, entry in value.items())
        vars_of = getattr(value, "__dict__", None)  # a model's state carries its versions there
        if vars_of:
            vars(copy).update(plain(dict(vars_of), where))
        return copy
    if type(value) in (list, tuple, set):
        return type(value)(plain(entry, f"{where}[{n}]") for n, entry in enumerate(value))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.ndim == 0:
        return value.item()
    raise ValueError(
        f"{where} is a {type(value).__name__}, expected numbers, strings, tensors, and lists, "
        "tuples, sets and dicts of them, which load without running code; convert it or leave it "
        "out"
    )


# Read.


def find(path: Path) -> Path:
    """The checkpoint at `path`, or the newest complete one in that directory.

    Raises:
        DDLError: there is none.
    """
    if (path / MANIFEST).exists():
        reason = _incomplete(path)
        if reason is not None:
            raise DDLError(f"{reason}; {ANOTHER}")
        return path
    reasons: list[str] = []
    for _, folder in reversed(_numbered(path)):
        reason = _incomplete(folder)
        if reason is None:
            for skipped in reasons:
                logger.warning("passed over: %s", skipped)
            return folder
        reasons.append(reason)
    what = "; ".join(reasons) if reasons else "there is none"
    kind = DDLError if reasons else NoCheckpointError
    raise kind(f"no complete checkpoint in {path} ({what}), {EXPECTED}; check the path")


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint says of itself.

    Raises:
        DDLError: it was written by something else.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DDLError(f"{path} cannot be read ({error}), {EXPECTED}; {ANOTHER}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise DDLError(f"{path} is not that of a ddl checkpoint, {EXPECTED}; check the path")
    version = content.pop("version", None)
    if version != VERSION:
        raise DDLError(
            f"{path} has format version {version}, expected {VERSION}; load it with the version of "
            "ddl that wrote it"
        )
    try:
        manifest = Manifest(**content)
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest.files.items()}
        lacking = {JOB, *map(shard, range(manifest.P))} - files.keys()
    except (TypeError, ValueError, AttributeError) as error:
        raise DDLError(f"{path} is damaged ({error}), {EXPECTED}; {ANOTHER}") from error
    if lacking:
        raise DDLError(f"{path} does not list {min(lacking)}, {EXPECTED}; {ANOTHER}")
    return Manifest(**{**content, "files": files})


def read(folder: Path, name: str, manifest: Manifest) -> Any:
    """The content of one file, on the CPU.

    Raises:
        DDLError: it is not the file that was written.
    """
    path, (_, expected) = folder / name, manifest.files[name]
    try:
        got = _sha256(path)
        if got != expected:
            raise DDLError(
                f"{path} has SHA-256 {got[:12]}..., expected {expected[:12]}...: it is damaged, or "
                f"from another checkpoint; {ANOTHER}"
            )
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DDLError(
            f"{path} cannot be read ({error}); every rank needs the same files, so the directory "
            "must be one that all machines share"
        ) from error


def _incomplete(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint; checksums are left to `read`.

    Raises:
        DDLError: it was written by something else.
    """
    if not (folder / MANIFEST).exists():
        return f"{folder} has no {MANIFEST}"
    for name, (size, _) in read_manifest(folder).files.items():
        path = folder / name
        got = path.stat().st_size if path.exists() else None
        if got != size:
            what = "is missing" if got is None else f"has {got} bytes"
            return f"{path} {what}, expected {size} bytes"
    return None


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """The folders in `directory` that are named as checkpoints, the newest last."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
