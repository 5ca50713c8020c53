"""Find the CUDA sources, wherever and however the package is installed."""

from importlib import resources
from pathlib import Path

SOURCE_SUFFIXES = (".cu", ".cuh")


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
        known = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in SOURCE_SUFFIXES))
        raise FileNotFoundError(f"no CUDA source named {name!r}; expected one of {known}")
    return path.read_text(encoding="utf-8")
