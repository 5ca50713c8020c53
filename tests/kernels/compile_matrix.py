# python tests/kernels/compile_matrix.py [accumulate.cu ...]
"""Registers and shared memory of every kernel on every architecture, as NVRTC's assembler tells."""

import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddl.kernels import sources
from ddl.kernels.compiler import Compiler, compiler, kernels_in

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
REPORT = ("--ptxas-options=-v",)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture.

    Attributes:
        registers: of a thread.
        shared: bytes of shared memory of a block.
        stack: bytes of local memory of a thread: arrays that are not in registers.
        spilled: bytes stored to and loaded from local memory for want of registers.
    """

    source: str
    kernel: str
    target: str
    registers: int
    shared: int
    stack: int
    spilled: int


def usage(source: str, target: str, code: bytes, log: str) -> list[Usage]:
    """Read the assembler's report of one compilation.

    Raises:
        ValueError: it does not tell of every kernel in the code.
    """
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.partition("'")[0]
        numbers = {
            name: sum(int(number) for number in re.findall(rf"(\d+) {unit}", part))
            for name, unit in (
                ("registers", "registers"),
                ("shared", "bytes smem"),
                ("stack", "bytes stack frame"),
                ("spilled", "bytes spill (?:stores|loads)"),
            )
        }
        found[kernel] = Usage(source, kernel, target, **numbers)
    if sorted(found) != kernels_in(code) or not all(one.registers for one in found.values()):
        raise ValueError(f"the assembler did not report on every kernel of {source}:\n{log}")
    return [found[kernel] for kernel in sorted(found)]


def compile_all(names: Iterable[str], using: Compiler) -> list[Usage]:
    """Compile the sources for all architectures, two at a time.

    Raises:
        RuntimeError: one does not compile.
    """

    def one(job: tuple[str, int]) -> list[Usage]:
        name, architecture = job
        compiled = using.compile(name, f"sm_{architecture}", REPORT)
        return usage(name, f"sm_{architecture}", compiled.code, compiled.log)

    jobs = [(name, architecture) for name in names for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        return [row for rows in pool.map(one, jobs) for row in rows]


def table(rows: list[Usage]) -> str:
    """One line a kernel: registers and bytes of shared memory on each architecture."""
    of = {(row.source, row.kernel, row.target): row for row in rows}
    targets = [f"sm_{architecture}" for architecture in ARCHITECTURES]
    width = max(len(f"{row.source} {row.kernel}") for row in rows)
    lines = [
        f"{'registers a thread + shared bytes a block':{width}} "
        + "".join(f"{t:>10}" for t in targets)
    ]
    for source, kernel in dict.fromkeys((row.source, row.kernel) for row in rows):
        cells = ""
        for target in targets:
            row = of[source, kernel, target]
            local = "!" if row.stack or row.spilled else ""
            cells += f"{f'{local}{row.registers}+{row.shared}':>10}"
        lines.append(f"{f'{source} {kernel}':{width}} {cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(compiler())
    print(table(compile_all(sys.argv[1:] or sources.names(".cu"), compiler())))
    print("! uses local memory")
