"""Text for language models: files, split into training, validation and test; words as numbers.

Where no files are given the text is the source code of Python's own standard library: real text
that is on every machine. Which file goes into which part depends on its name alone.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
PARTS = ("train", "valid", "test")
CODE = re.compile(r"[^\W\d]\w*|\d[\w.]*|\n|[^\w\s]")  # names, numbers, ends of lines, signs


def split_words(text: str) -> list[str]:
    """Words between spaces, as in PTB's files, and the end of each line."""
    return [word for line in text.splitlines() for word in (*line.split(), END_OF_LINE)]


def split_code(text: str) -> list[str]:
    """Names, numbers, single signs, and the end of each line that has any."""
    tokens: list[str] = []
    for token in CODE.findall(text):
        if token != "\n":
            tokens.append(token)
        elif tokens and tokens[-1] != END_OF_LINE:
            tokens.append(END_OF_LINE)
    return tokens


TOKENIZERS: Mapping[str, Callable[[str], list[str]]] = MappingProxyType(
    {"words": split_words, "code": split_code}
)


@dataclass(frozen=True)
class Corpus:
    """One text in three parts, each int64 [its number of tokens], and what the numbers mean."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def read_corpus(
    files: Sequence[Path],
    tokenizer: str,
    words: int,
    train_tokens: int | None = None,
    held_out_tokens: int | None = None,
) -> Corpus:
    """Read files and number their words.

    Files whose name contains `valid` or `test` are those parts, all others are for training. Where
    that leaves a part out, and with the standard library, names decide by a hash: one file in ten
    is for validation, one for testing. A single file is cut: 80, 10 and 10 % of its tokens.

    Args:
        files: texts in UTF-8; empty: the standard library's modules.
        tokenizer: one of `TOKENIZERS`.
        words: size of the vocabulary at most: the most frequent words of the training text.
        train_tokens: how much of the training text to use; None: all.
        held_out_tokens: how much of each of the two other texts to use; None: all.

    Raises:
        ValueError: a file cannot be read, or a part has fewer than two tokens.
    """
    split, parts = TOKENIZERS[tokenizer], _parts(files or standard_library())
    limits = (train_tokens, held_out_tokens, held_out_tokens)
    if parts is None:
        tokens = split(_read(files[0]))
        cuts = (len(tokens) * 8 // 10, len(tokens) * 9 // 10)
        texts = [tokens[: cuts[0]], tokens[cuts[0] : cuts[1]], tokens[cuts[1] :]]
        texts = [text[:limit] for text, limit in zip(texts, limits, strict=True)]
    else:
        texts = [_tokens(parts[name], split, n) for name, n in zip(PARTS, limits, strict=True)]
    for name, text in zip(PARTS, texts, strict=True):
        if len(text) < 2:
            raise ValueError(
                f"the {name} part of the text has {len(text)} tokens, expected at least 2; give "
                "more text, or files whose names contain valid and test"
            )
    vocabulary = make_vocabulary(texts[0], words)
    numbers = {word: number for number, word in enumerate(vocabulary)}
    unknown = numbers[UNKNOWN]
    train, valid, test = (
        torch.tensor([numbers.get(token, unknown) for token in text]) for text in texts
    )
    return Corpus(train, valid, test, vocabulary)


def make_vocabulary(tokens: Iterable[str], words: int) -> tuple[str, ...]:
    """The most frequent tokens, the most frequent first, equals in alphabetical order.

    `UNKNOWN` is always among them, in the last place if it is not in the text.
    """
    counts = Counter(tokens)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if UNKNOWN in ranked[:words]:
        return tuple(ranked[:words])
    return (*ranked[: words - 1], UNKNOWN)


def standard_library() -> list[Path]:
    """The modules of Python's standard library that are a single file, in alphabetical order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _parts(files: Sequence[Path]) -> dict[str, list[Path]] | None:
    """Which files are for what; None for a single file, which is to be cut."""
    if len(files) == 1:
        return None
    for name_of in (_part_by_word, _part_by_hash):
        parts: dict[str, list[Path]] = {name: [] for name in PARTS}
        for file in files:
            parts[name_of(file)].append(file)
        if all(parts.values()):
            return parts
    return parts


def _part_by_word(file: Path) -> str:
    return next((part for part in ("valid", "test") if part in file.name), "train")


def _part_by_hash(file: Path) -> str:
    tenth = hashlib.blake2b(file.name.encode()).digest()[0] % 10
    return {0: "valid", 1: "test"}.get(tenth, "train")


def _tokens(
    files: Iterable[Path], split: Callable[[str], list[str]], limit: int | None
) -> list[str]:
    tokens: list[str] = []
    for file in files:
        if limit is not None and len(tokens) >= limit:
            break
        tokens += split(_read(file))
    return tokens[:limit]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read {file}: {reason}; give a text file in UTF-8") from error
