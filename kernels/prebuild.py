"""Compile the CUDA sources ahead of time, for machines that shall not compile when they train.

    python -m ddl.kernels.prebuild --arch sm_80 sm_90 --output kernels.d
    DDL_CUDA_PREBUILT=kernels.d mpirun -np 4 python train.py

Needs neither a GPU nor a CUDA toolkit, only the NVRTC that torch's CUDA builds bring. "compute_90"
instead of "sm_90" writes PTX, which newer devices run too and which the driver translates when it
loads it. DIR/sm_90 then holds one file a source, and a manifest with the digest of all sources,
headers and options. Where DDL_CUDA_PREBUILT is set nothing is ever compiled: a folder that is not
of these sources, or holds nothing for the device, is refused.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ddl.kernels import sources
from ddl.kernels.compiler import choose, compiler

VARIABLE = "DDL_CUDA_PREBUILT"
MANIFEST = "manifest.json"


def directory() -> Path | None:
    """Return the folder that DDL_CUDA_PREBUILT names, None where it is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def build(target: str, output: Path) -> Path:
    """Compile every source for one target, such as "sm_90"; return the folder written to.

    Raises:
        RuntimeError: a source does not compile, or NVRTC is not found.
        OSError: the folder cannot be written.
    """
    folder = output / target
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    manifest.unlink(missing_ok=True)  # until the last file is written there is no build
    for name in sources.names(".cu"):
        (folder / name).with_suffix(".bin").write_bytes(compiler().compile(name, target).code)
    about = {"digest": sources.digest(), "options": sources.OPTIONS, "compiler": str(compiler())}
    manifest.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return folder


def load(output: Path, name: str, capability: tuple[int, int]) -> bytes:
    """Return the code of one source for a device of the compute capability.

    Raises:
        RuntimeError: the folder holds none for the device, or is of other sources.
    """
    built = sorted(path.parent.name for path in output.glob(f"*/{MANIFEST}"))
    target = choose(built, capability)
    own = f"sm_{capability[0]}{capability[1]}"
    cure = f"build it with python -m ddl.kernels.prebuild --arch {own} --output {output}"
    if target is None:
        raise RuntimeError(
            f"{VARIABLE}={output} holds nothing for {own}, got builds for "
            f"{', '.join(built) or 'nothing'}; {cure}, or unset {VARIABLE}"
        )
    found = json.loads((output / target / MANIFEST).read_text(encoding="utf-8"))["digest"]
    if found != sources.digest():
        raise RuntimeError(
            f"{VARIABLE}={output} was built from other sources or options: {target} has digest "
            f"{found}, expected {sources.digest()}; {cure}, or unset {VARIABLE}"
        )
    return (output / target / name).with_suffix(".bin").read_bytes()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line in the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m ddl.kernels.prebuild", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--arch", nargs="+", required=True, metavar="sm_XX", help="sm_90 or compute_90; several"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="made if missing")
    options = parser.parse_args(arguments)
    for target in options.arch:
        if not re.fullmatch(r"(sm|compute)_\d+", target):
            parser.error(f"--arch must be like sm_90 or compute_90, got {target!r}")
    try:
        for target in options.arch:
            print(f"{build(target, options.output)}: {len(sources.names('.cu'))} sources")
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
