"""docs/results.md: every number comes from a finished run, and every run from a command."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"


@pytest.fixture
def modules(monkeypatch):
    """Import modules of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_tables_of_the_page_are_what_the_runs_say(modules):
    page = modules("results_page")
    assert page.written(PAGE.read_text()) == PAGE.read_text()


def test_every_table_of_the_page_is_written_by_the_command(modules):
    page, text = modules("results_page"), PAGE.read_text()
    assert len(page.BLOCK.findall(text)) == text.count("<!-- end -->") >= 5
    outside = page.BLOCK.sub("", text)
    assert not re.search(r"^\|.*\d\.\d", outside, re.MULTILINE), "a table of numbers by hand"


def test_every_run_of_every_grid_is_there_and_none_besides(modules):
    bench, grids = modules("bench_convergence"), modules("results_grids")
    lines = modules("convergence_rows")
    wanted = {key for name in grids.GRIDS for key in bench.keys(grids.flags(name))}
    rows = lines.read_rows(grids.CONVERGENCE)
    assert {lines.key_of(row["cell"], row["data"]) for row in rows} == wanted
    assert len(rows) == len(wanted)
    assert all(row["ranks_agree"] for row in rows)


def test_pictures_that_are_shown_are_there_and_no_others(modules):
    shown = re.findall(r"\]\(pictures/([^)]+)\)", PAGE.read_text())
    assert sorted(set(shown)) == sorted(path.name for path in (PAGE.parent / "pictures").iterdir())


def test_a_missing_run_is_named_with_the_command_that_makes_it(modules, monkeypatch, tmp_path):
    page, grids = modules("results_page"), modules("results_grids")
    monkeypatch.setattr(grids, "CONVERGENCE", tmp_path / "none.jsonl")
    name = next(iter(grids.GRIDS))
    with pytest.raises(ValueError, match=f"runs of {name} are not in .*run: python benchmarks/"):
        page.runs_of(name)


def run(compressor, accuracies, sent, **cell):
    cell = {
        "task": "resnet20",
        "P": 4,
        "batch_size": 8,
        "epochs": 1,
        "lr": 0.02,
        "compressor": compressor,
        "density": 1.0,
        "density_warmup": False,
        "wire": "plain",
        "global_ratio": 1.0,
        "seed": 1,
        **cell,
    }
    points = [
        {"step": 10 * (i + 1), "bytes": sent * (i + 1), "accuracy": accuracy}
        for i, accuracy in enumerate(accuracies)
    ]
    return {
        "cell": cell,
        "validations": points,
        "val_accuracy": accuracies[-1],
        "val_loss": 1.0,
        "train_loss": 0.5,
        "bytes_per_step": sent / 10,
    }


def test_accuracy_is_the_mean_over_seeds_and_beside_dense_of_the_same_seeds(modules):
    table = modules("results_tables").accuracy(
        [
            run("gtopk-exact", [0.88], 1e5, density=0.01, density_warmup=True, seed=1),
            run("gtopk-exact", [0.90], 1e5, density=0.01, density_warmup=True, seed=2),
            run("none", [0.90], 4e6, seed=1),
        ]
    )
    dense, exact = table.splitlines()[2:]
    assert dense == "| `none` |  | 1 | 90.00 |  | 0.500 | 400.0 | 1.0 |"
    assert exact == (
        "| `gtopk-exact`, 1 winner a pick | 0.01 after warm-up | 2 | 89.00 (1.41) | -2.00 (1 seed) "
        "| 0.500 | 10.0 | 40.0 |"
    )


def test_runs_that_cannot_be_compared_are_not_in_one_table(modules):
    mixed = [run("none", [0.9], 1e6), run("topk", [0.9], 1e6, P=16, density=0.01)]
    with pytest.raises(ValueError, match="runs of several task, P, batch_size, epochs, lr in one"):
        modules("results_tables").accuracy(mixed)


@pytest.mark.parametrize(
    "block",
    [
        "<!-- perplexity of lstm-P4 --> \n\n<!-- end -->",
        "<!-- perplexity of lstm-P4 -->\n\n",
        "<!--perplexity of lstm-P4 -->\n\n<!-- end -->",
    ],
    ids=["space", "no end", "no space"],
)
def test_a_table_that_would_not_be_written_is_an_error(modules, block):
    with pytest.raises(ValueError, match="expected each comment alone on its line as <!-- NAME of"):
        modules("results_page").written(f"# Results\n\n{block}\n")


def test_bytes_count_until_the_accuracy_is_first_seen(modules):
    table = modules("results_tables").bytes_to_accuracy(
        [
            run("none", [0.5, 0.81, 0.9, 0.86], 1e6),
            run("topk", [0.5, 0.6, 0.8, 0.82, 0.7], 1e4, density=0.01),
            run("gaussiank", [0.5, 0.6], 1e4, density=0.01),
        ]
    )
    assert "Accuracy to reach: 81.00 %." in table
    dense, topk, gaussiank = table.splitlines()[-3:]
    assert dense.startswith("| `none` |  | 1 | 20 | 2.00 |  |")
    assert topk == "| `topk` | 0.01 | 1 | 40 | 0.04 | 1/50.0 | 70.00 |"
    assert "not reached" in gaussiank


def test_a_file_of_other_lines_is_named(modules, monkeypatch, tmp_path):
    (tmp_path / "cluster.jsonl").write_text('{"kind": "collective"}\n')
    (tmp_path / "advise.jsonl").write_text("{")
    page, grids = modules("results_page"), modules("results_grids")
    monkeypatch.setattr(grids, "FOLDER", tmp_path)
    for name, file in (("cluster", "cluster.jsonl"), ("advice", "advise.jsonl")):
        with pytest.raises(ValueError, match=f"{file} has other lines than the table {name}"):
            page.table(name, [file])


def test_committed_lines_are_whole(modules):
    folder = modules("results_grids").FOLDER
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            assert isinstance(json.loads(line), dict), file
