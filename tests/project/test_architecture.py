"""Imports point one way: examples, benchmarks -> ddl -> kernels -> csrc, and down the layers."""

import ast
from pathlib import Path

import pytest
from launch import ROOT

# Each room may import those in rows below its own, and its own row.
LAYERS = [
    ["ddl.advise"],
    ["ddl"],
    ["ddl.checkpoint", "ddl.diagnostics"],
    ["ddl.ddp", "ddl.optimizer"],
    ["ddl.reduction"],
    ["ddl.flags", "ddl.gpus", "ddl.metrics", "ddl.state", "ddl.world"],
    ["ddl.aggregation"],
    ["ddl.compressors"],
    ["ddl.selectors", "ddl.collectives", "ddl.density", "ddl.links", "ddl.nodes"],
    ["ddl.wires"],
    ["ddl.sparse", "ddl.comm", "ddl.settings"],
    ["ddl.errors", "ddl.streams", "ddl.perfmodel", "ddl.workloads"],
    ["ddl.kernels"],
    ["ddl.csrc"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(module: str) -> str:
    """The room that a module of ddl belongs to."""
    return ".".join(module.split(".")[:2])


def modules(folder: Path, package: str):
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join([package, *parts]).removesuffix(".__init__")
        yield name, path


def imports(path: Path):
    """The modules of ddl that a file imports, at its top or within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module in {"ddl"}:
                names = [f"ddl.{alias.name}" for alias in node.names]
            assert node.level == 0, f"{path}: relative import"
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "ddl")


ENGINE = [
    *modules(ROOT / "ddl", "ddl"),
    *modules(ROOT / "kernels", "ddl.kernels"),
    *modules(ROOT / "csrc", "ddl.csrc"),
]


@pytest.mark.parametrize(("module", "path"), ENGINE, ids=[name for name, _ in ENGINE])
def test_a_module_imports_only_what_lies_below(module, path):
    mine = LEVEL[room_of(module)]
    for imported in imports(path):
        theirs = LEVEL[room_of(imported)]
        assert theirs >= mine, f"{module} imports {imported}, which lies above it"


def test_within_the_kernels_nothing_knows_of_gradients_or_ranks_above():
    for module, path in modules(ROOT / "kernels", "ddl.kernels"):
        for imported in imports(path):
            assert imported.startswith(("ddl.kernels", "ddl.csrc")), module


@pytest.mark.parametrize("folder", ["ddl", "kernels", "csrc"])
def test_the_engine_does_not_know_examples_or_benchmarks(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                text = ast.unparse(node)
                assert "examples" not in text and "benchmarks" not in text, path


def test_files_can_be_read_in_one_go():
    for folder in ("ddl", "kernels", "csrc", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.[pc]*"):
            if path.suffix in {".py", ".cu", ".cuh", ".cpp"}:
                lines = len(path.read_text().splitlines())
                assert lines <= 450, f"{path} has {lines} lines; split it by meaning"
