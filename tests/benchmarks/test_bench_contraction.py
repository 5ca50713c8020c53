"""The study of contraction: what it trains, what it judges, and what it keeps."""

import importlib
import json
from pathlib import Path

import pytest

import ddl
from ddl.workloads.idx import FASHION_MNIST_DIR

FOLDER = Path(__file__).parents[2] / "benchmarks"
LSTM = (
    *("--tasks", "lstm", "--ranks", "2", "--epochs", "1", "--hidden", "16", "--density", "0.05"),
    *("--train-tokens", "1500", "--held-out-tokens", "200", "--vocabulary", "100"),
    *("--batch-size", "4", "--every", "2"),
)
LAYERS = {
    *("embedding.weight", "output.weight", "output.bias"),
    *(f"lstm.{w}_{g}_l{n}" for w in ("weight", "bias") for g in ("ih", "hh") for n in (0, 1)),
}


@pytest.fixture
def modules(monkeypatch):
    """Import modules of the benchmarks by name; the number of threads is put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(ddl.kernels.workers, "_wanted", None)
    return importlib.import_module


@pytest.fixture
def bench(modules, tmp_path):
    """Run the study with flags; returns its finished runs."""
    main = modules("bench_contraction").main

    def run(*flags: str) -> list[dict]:
        main([*flags, "--results", str(tmp_path / "runs.jsonl")])
        return [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]

    return run


def test_every_layer_and_bucket_is_judged_kept_drawn_and_not_run_again(bench, tmp_path, capsys):
    flags = (*LSTM, "--compressors", "topk")
    (row,) = bench(*flags, "--plot", str(tmp_path / "pictures"))
    picture = tmp_path / "pictures" / "contraction-lstm.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "lstm topk P=2 density=0.05 seed=1" in out and "bucket 0: left 0." in out
    samples = len(range(0, row["steps"], 2))
    assert {each["name"] for each in row["layers"]["each"]} == LAYERS
    (bucket,) = row["buckets"]["each"]
    assert bucket["held"]["samples"] == bucket["held"]["judged"] == samples
    assert bucket["density"] == pytest.approx(0.05, rel=0.01)
    assert 0 < bucket["contraction"] < bucket["bound_random"]
    layers = row["layers"]["held"]
    assert layers["samples"] == samples * len(LAYERS) >= layers["judged"] >= layers["bell_shaped"]
    assert row["ranks_agree"] is True
    assert bench(*flags) == [row]
    assert "1 runs, 1 of them" in capsys.readouterr().out
    (_, other) = bench(*flags, "--every", "3")
    assert other["cell"] == row["cell"] and other["data"]["every"] == 3


def test_the_study_trains_what_the_convergence_benchmark_trains(bench, modules, tmp_path):
    flags = [*LSTM, "--compressors", "gtopk-exact"]
    (watched,) = bench(*flags)
    flags = [*flags[: flags.index("--every")], *flags[flags.index("--every") + 2 :]]
    flags += ["--global-ratio", "1", "--results", str(tmp_path / "alone.jsonl")]
    modules("bench_convergence").main(flags)
    alone = json.loads((tmp_path / "alone.jsonl").read_text())
    assert watched["cell"] == alone["cell"]
    for key in ("steps", "train_loss", "val_loss"):
        assert watched[key] == alone[key]


@pytest.mark.skipif(not FASHION_MNIST_DIR.is_dir(), reason="Debian's dataset-fashion-mnist")
def test_quick_is_one_small_run(bench):
    (row,) = bench("--quick", "--train-images", "64")
    assert (row["cell"]["task"], row["cell"]["P"], row["steps"]) == ("resnet20", 2, 4)
    assert row["layers"]["held"]["samples"] == len(row["layers"]["each"])


def test_a_dry_run_lists_each_run_once_and_runs_none(bench, capsys):
    with pytest.raises(FileNotFoundError):  # nothing is written
        bench(*LSTM, "--dry-run", "--seeds", "1", "2", "1")
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(cell["compressor"], cell["seed"]) for cell in cells] == [
        (name, seed) for seed in (1, 2) for name in ("topk", "gtopk-exact", "gaussiank")
    ]


def test_dense_contestants_have_nothing_to_study(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(*LSTM, "--compressors", "none")
    assert "invalid choice: 'none'" in capsys.readouterr().err


def record(picked=1, contraction=0.5, bell_shaped=True, layer="a", step=0):
    kept = 1 - picked / 10
    return {
        **{"layer": layer, "bucket": 0, "step": step, "numel": 10, "picked": picked},
        **{"contraction": contraction, "bound_topk": kept**2, "bound_random": kept},
        **{"bell_shaped": bell_shaped, "dip": 0.1, "density": picked / 10, "overlap": None},
        **{"gradient": {"kurtosis": None}, "accumulated": {"kurtosis": 3.0}},
        **{"gaussian_count": 2 * picked, "age": {"median": 4.0} if layer else None},
    }


def test_shares_are_of_samples_of_which_some_but_not_all_was_picked(modules):
    summary = modules("contraction_summary")
    records = [
        record(picked=0, contraction=1.0),
        record(picked=10, contraction=0.0),
        record(contraction=0.81),  # at the bound, which is within
        record(contraction=0.85),
        record(contraction=0.85, bell_shaped=False),
        record(contraction=0.95, bell_shaped=False),
    ]
    held = summary.held(records)
    assert (held["samples"], held["judged"], held["bell_shaped"]) == (6, 4, 2)
    assert (held["within_topk"], held["within_random"]) == (0.25, 0.75)
    assert (held["bell_within_topk"], held["bell_within_random"]) == (0.5, 1.0)
    assert summary.held([])["within_topk"] is None


def test_the_worst_exceptions_are_kept(modules):
    summary = modules("contraction_summary")
    records = [record(contraction=0.8 + step / 1000, step=step) for step in range(100)]
    worst = summary.exceptions(records)
    assert [each["step"] for each in worst] == list(range(99, 79, -1))
    assert worst[0]["kurtosis"] == 3.0 and worst[0]["bound_topk"] == pytest.approx(0.81)


def test_medians_are_of_what_is_known_and_buckets_stand_apart(modules):
    records = [record(contraction=c) for c in (0.1, 0.2, 0.6)] + [record(layer=None)]
    summary = modules("contraction_summary").summarise(records)
    (layer,), (bucket,) = summary["layers"]["each"], summary["buckets"]["each"]
    assert (layer["name"], bucket["name"]) == ("a", "bucket 0")
    assert (layer["contraction"], layer["gaussian_ratio"], layer["age"]) == (0.2, 2.0, 4.0)
    assert layer["overlap"] is layer["kurtosis_gradient"] is bucket["age"] is None


def test_nothing_to_draw_is_said(modules, tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        modules("contraction_plot").draw([], tmp_path)
