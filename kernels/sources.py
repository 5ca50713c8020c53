"""Find the CUDA sources, wherever and however the package is installed, and tell them apart."""

import hashlib
from importlib import resources
from pathlib import Path

SOURCE_SUFFIXES = (".cu", ".cuh")

# Rounding is part of what the kernels promise. No fast math: products and sums are rounded one
# after the other, and denormals count.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")


def source_directory() -> Path:
    """Return the folder of the installed CUDA sources, the include path of every one of them.

    Raises:
        FileNotFoundError: the package lies in an archive or lacks its sources.
    """
    folder = resources.files("ddl.csrc")
    if not isinstance(folder, Path):
        # An editable install may answer with several places joined into one.
        folder = Path(str(folder.joinpath("common.cuh"))).parent
    if not (folder / "common.cuh").is_file():
        raise FileNotFoundError(
            f"no CUDA sources in {folder}; install ddl from a checkout or a wheel, not zipped"
        )
    return folder


def source(name: str) -> str:
    """Return the text of one CUDA source, such as "scatter.cu".

    Raises:
        FileNotFoundError: there is none of that name.
    """
    folder = source_directory()
    path = folder / name
    if Path(name).name != name or path.suffix not in SOURCE_SUFFIXES or not path.is_file():
        known = ", ".join(names(*SOURCE_SUFFIXES))
        raise FileNotFoundError(f"no CUDA source named {name!r}; expected one of {known}")
    return path.read_text(encoding="utf-8")


def names(*suffixes: str) -> list[str]:
    """Return the names of the sources that end in one of the suffixes, sorted."""
    return sorted(path.name for path in source_directory().iterdir() if path.suffix in suffixes)


def digest() -> str:
    """Return 16 hexadecimal digits that change with any source, any header and the options."""
    parts = [option.encode() for option in OPTIONS]
    for name in names(*SOURCE_SUFFIXES):
        parts += [name.encode(), source(name).encode()]
    # Each part with its length, so that text cannot wander from one to the next.
    framed = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return hashlib.sha256(framed).hexdigest()[:16]
