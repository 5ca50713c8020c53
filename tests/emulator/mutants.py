"""Kernels with one thing missing: a barrier, a fence, the check of a bound.

All mutants of a source are compiled at once, each behind a switch, and one is chosen when a kernel
is launched. Mutant 0 is the kernel as it is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulator.emulated import EmulatedDriver

SWITCH = """extern "C" {
__attribute__((visibility("default"))) int emulator_chosen = 0;
}
inline bool mutant(int number) { return emulator_chosen == number; }
"""

# A value that a bound is compared with, and the bounds that kernels know.
_CALL = r"static_cast<\w+>\([\w.]+\)|[\w.]+(?:\((?:[^()]|\([^()]*\))*\)|\[\w+\])?"
_LEFT = rf"(?<![\w.)\]>] )(?<![\w.)\]>])(?P<left>(?:{_CALL})(?: \+ [\w.]+)*)"
# Loops over a thread's own values, whose number is known to the compiler.
_CONSTANT = re.compile(r"\d+|(?:[\w<>]+::)?k(?!Bins)[A-Z]\w*")
_BOUND = r"(?P<right>numel|count|capacity|\w+_count|range\.last|last|0)(?![\w.(\[])"


@dataclass(frozen=True)
class Mutant:
    """One change to one file.

    Attributes:
        number: of the switch, from 1.
        file: its name.
        line: where it is.
        kind: "barrier", "fence", "bound" (the check always passes) or "loop" (one round more).
        start: where in the text the change begins.
        original: what stands there.
        changed: what stands there instead, with the switch.
    """

    number: int
    file: str
    line: int
    kind: str
    start: int
    original: str
    changed: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind} {' '.join(self.original.split())}"


def _statement(match: re.Match[str], number: int) -> str:
    return f"if (!mutant({number})) {match[0]}"


def _condition(match: re.Match[str], number: int) -> str:
    """A check that always lets through: it holds, or what is asked for does not."""
    passes = (
        match["operator"] in ("<", "<=") if match["right"] != "0" else match["operator"] == ">="
    )
    joined, switch = ("||", "mutant") if passes else ("&&", "!mutant")
    return f"({switch}({number}) {joined} {match[0]})"


def _loop(match: re.Match[str], number: int) -> str:
    left, right = match["left"], match["right"]
    return f"{match['head']}{left} < {right} || (mutant({number}) && {left} == {right});"


_RULES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str], int], str]], ...] = (
    ("barrier", re.compile(r"__sync(?:threads|warp)\(\);"), _statement),
    ("fence", re.compile(r"__threadfence\(\);"), _statement),
    (
        "loop",
        re.compile(
            r"(?P<head>for \([^;{}]*; )(?P<left>[\w.]+) < (?P<right>[\w.:<>]+(?: \+ \w+)?);"
        ),
        _loop,
    ),
    (
        "bound",
        re.compile(rf"{_LEFT} (?P<operator><=|<|>=) {_BOUND}"),
        _condition,
    ),
)


def _in_comment(text: str, place: int) -> bool:
    return "//" in text[text.rfind("\n", 0, place) + 1 : place]


def enumerate_mutants(texts: Mapping[str, str]) -> list[Mutant]:
    """Find every place to change in sources, by name."""
    found: list[Mutant] = []
    for file, text in texts.items():
        for kind, pattern, change in _RULES:
            for match in pattern.finditer(text):
                if _in_comment(text, match.start()):
                    continue
                if kind == "loop" and _CONSTANT.fullmatch(match["right"]):
                    continue
                overlaps = any(
                    m.file == file
                    and match.start() < m.start + len(m.original)
                    and m.start < match.end()
                    for m in found
                )
                if overlaps:
                    continue
                number = len(found) + 1
                line = text.count("\n", 0, match.start()) + 1
                new = change(match, number)
                found.append(Mutant(number, file, line, kind, match.start(), match[0], new))
    return found


def with_switches(texts: Mapping[str, str], mutants: Sequence[Mutant]) -> dict[str, str]:
    """Return the texts with all mutants in them, behind their switches."""
    changed = {}
    for file, text in texts.items():
        for mutant in sorted(mutants, key=lambda m: -m.start):
            if mutant.file != file:
                continue
            end = mutant.start + len(mutant.original)
            if text[mutant.start : end] != mutant.original:
                raise ValueError(f"{file} does not hold what {mutant} changes")
            text = text[: mutant.start] + mutant.changed + text[end:]
        changed[file] = SWITCH + text if file.endswith(".cu") else text
    return changed


def read_sources(folder: Path) -> dict[str, str]:
    """Return the text of each CUDA source in a folder."""
    paths: Iterator[Path] = (p for p in sorted(folder.iterdir()) if p.suffix in (".cu", ".cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


class MutatedDriver(EmulatedDriver):
    """Runs sources with switches in them.

    Attributes:
        chosen: number of the mutant, 0 for none.
    """

    chosen = 0

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[Any], **options: Any
    ) -> None:
        """See EmulatedDriver; with one of the mutants."""
        path = self.library(source).path
        ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "emulator_chosen").value = self.chosen
        if kernel == "finish_moments":
            # As on a device of which one block cannot take all the tiles.
            blocks = min(4, arguments[2].numel() // 2)
        super().launch(source, kernel, blocks, arguments, **options)
