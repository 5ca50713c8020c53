"""The convergence benchmark: runs are repeatable and resumable, and its rival is the real one."""

import importlib
import json
from pathlib import Path

import numpy as np
import powersgd_job as job
import pytest
import torch
from launch import torchrun
from torch import nn

import ddl
from ddl.comm import threads
from ddl.compressors import EXACT_RATIO
from ddl.workloads.idx import FASHION_MNIST_DIR

FOLDER = Path(__file__).parents[2] / "benchmarks"
LSTM = (
    *("--tasks", "lstm", "--ranks", "3", "--epochs", "1", "--hidden", "16", "--density", "0.05"),
    *("--train-tokens", "1500", "--held-out-tokens", "200", "--vocabulary", "100"),
)


@pytest.fixture
def modules(monkeypatch):
    """Import modules of the benchmarks by name; the number of threads is put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(ddl.kernels.workers, "_wanted", None)
    return importlib.import_module


@pytest.fixture
def bench(modules, tmp_path):
    """Run the benchmark with flags; returns its finished runs."""
    main = modules("bench_convergence").main

    def run(*flags: str) -> list[dict]:
        main([*flags, "--results", str(tmp_path / "runs.jsonl")])
        lines = (tmp_path / "runs.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    return run


def without_times(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("seconds")}


def test_a_run_is_kept_drawn_and_not_run_again(bench, tmp_path, capsys):
    flags = (*LSTM, "--compressors", "gtopk-exact")
    (row,) = bench(*flags, "--plot", str(tmp_path / "pictures"))
    assert (tmp_path / "pictures" / "lstm-P3.png").read_bytes().startswith(b"\x89PNG")
    assert row["ranks_agree"] is True
    assert row["validations"][-1]["step"] == row["curve"][-1]["step"] == row["steps"] == 4
    sent = row["validations"][-1]["bytes"]
    assert sent == pytest.approx(row["bytes_per_step"] * row["steps"]) and sent > 0
    capsys.readouterr()
    assert bench(*flags) == [row]
    assert "1 runs, 1 of them" in capsys.readouterr().out
    (_, other) = bench(*flags, "--hidden", "8")
    assert other["cell"] == row["cell"] and other["data"] != row["data"]


def test_equal_runs_have_equal_results_and_a_line_cut_off_is_run_again(bench, tmp_path):
    flags = (*LSTM, "--compressors", "gtopk-butterfly")
    (row,) = bench(*flags)
    whole = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(whole[:100])
    (again,) = bench(*flags)
    assert without_times(again) == without_times(row)


@pytest.mark.skipif(not FASHION_MNIST_DIR.is_dir(), reason="Debian's dataset-fashion-mnist")
def test_quick_is_one_small_run(bench):
    (row,) = bench("--quick", "--train-images", "64")
    assert (row["cell"]["task"], row["cell"]["P"], row["steps"]) == ("resnet20", 2, 2)
    assert 0 <= row["val_accuracy"] <= 1


def test_dense_ones_have_one_run_for_all_densities_and_one_contestant_has_ratios(bench, capsys):
    flags = ("--density", "0.1", "0.01", "--global-ratio", "1", "4", "--seeds", "1", "2")
    with pytest.raises(FileNotFoundError):  # nothing is written
        bench(*LSTM, *flags, "--dry-run")
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    counts = {name: sum(cell["compressor"] == name for cell in cells) for name in CONTESTANTS}
    per_seed = {"none": 1, "powersgd-4": 1, "gtopk-exact": 4}
    assert counts == {name: 2 * per_seed.get(name, 2) for name in CONTESTANTS}


def planned(bench, capsys, *flags):
    with pytest.raises(FileNotFoundError):  # nothing is written
        bench(*LSTM, *flags, "--dry-run")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]


def test_processes_may_share_the_runs(bench, capsys):
    flags = ("--compressors", "topk", "--seeds", "1", "2", "3", "4", "5")
    parts = [planned(bench, capsys, *flags, "--part", f"{i}/2") for i in (1, 2)]
    assert [len(part) for part in parts] == [3, 2]
    seeds = [cell["seed"] for cell in (*parts[0], *parts[1])]
    assert sorted(seeds) == [1, 2, 3, 4, 5]


def test_a_process_that_starts_later_has_the_same_share(bench, capsys):
    flags = (*LSTM, "--compressors", "topk", "none", "gaussiank")
    bench(*flags, "--part", "1/3")
    for part, left in (("1/3", []), ("2/3", ["none"]), ("3/3", ["gaussiank"])):
        capsys.readouterr()
        bench(*flags, "--part", part, "--dry-run")
        cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
        assert [cell["compressor"] for cell in cells] == left


def test_texts_of_one_name_are_told_apart(modules, tmp_path):
    texts = [tmp_path / folder / "corpus.txt" for folder in ("one", "other")]
    for number, text in enumerate(texts):
        text.parent.mkdir()
        text.write_text(f"text {number}")
    tasks, rows = modules("convergence_tasks"), modules("convergence_rows")
    one, other = (rows.describe(tasks.Data(tmp_path, (text,)), "lstm") for text in texts)
    assert one != other
    assert one["text"][0].startswith("corpus.txt ")


def test_results_that_cannot_be_written_are_refused_before_the_first_run(modules, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        modules("bench_convergence").main([*LSTM, "--results", str(tmp_path / "file" / "runs")])
    assert "cannot write --results" in capsys.readouterr().err


def test_every_contestant_can_be_run(bench):
    flags = (*LSTM[:-4], "--train-tokens", "500", "--held-out-tokens", "100", "--vocabulary", "50")
    rows = bench(*flags, "--ranks", "2", "--wire", "compact")
    assert {row["cell"]["compressor"] for row in rows} == set(CONTESTANTS)


def test_lines_of_something_else_are_refused(bench, tmp_path, capsys):
    (tmp_path / "runs.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(SystemExit, match="2"):
        bench(*LSTM, "--dry-run")
    assert "a line that is not a finished run" in capsys.readouterr().err


def test_part_is_checked(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench(*LSTM, "--part", "3/2")
    assert "expected I/N with 1 <= I <= N, got '3/2'" in capsys.readouterr().err


def test_equal_bytes_lower_the_density_of_larger_ratios(bench, capsys):
    flags = ("--compressors", "gtopk-exact", "none", "--ranks", "16", "--global-ratio", "1", "4")
    cells = planned(bench, capsys, *flags, "--equal-bytes", "--density", "0.01")
    # 2 k + 15/16 k entries are sent at ratio 1, 2 k + 15/4 k at ratio 4.
    density = {cell["global_ratio"]: cell["density"] for cell in cells if cell["density"] < 1}
    assert density == {1.0: 0.01, 4.0: pytest.approx(0.01 * 2.9375 / 5.75, rel=1e-3)}


def test_bytes_that_a_warm_up_makes_unequal_are_not_called_equal(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("--equal-bytes", "--density-warmup", "--dry-run")
    assert "--equal-bytes with --density-warmup" in capsys.readouterr().err


def test_exact_sums_keep_what_the_engine_keeps_by_default(bench, capsys):
    (cell,) = planned(bench, capsys, "--compressors", "gtopk-exact")
    assert cell["global_ratio"] == EXACT_RATIO


def test_formats_are_compared_where_entries_travel(bench, capsys):
    flags = ("--compressors", "none", "topk", "randomk", "--wire", "plain", "compact")
    cells = planned(bench, capsys, *flags)
    wires = {cell["compressor"]: [] for cell in cells}
    for cell in cells:
        wires[cell["compressor"]].append(cell["wire"])
    assert wires == {"none": ["plain"], "topk": ["plain", "compact"], "randomk": ["plain"]}


CONTESTANTS = (
    *("none", "powersgd-4", "topk", "gtopk-butterfly", "gtopk-exact", "gaussiank"),
    *("gaussiank-gtopk", "randomk"),
)


def test_missing_data_is_one_line(bench, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("--quick", "--data-dir", str(tmp_path / "nowhere"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere is not a folder" in line and "apt-get install dataset-fashion-mnist" in line


def test_curves_are_means_over_seeds_up_to_the_end_of_the_shortest(modules):
    mean_curve = modules("convergence_plot").mean_curve
    one = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}]
    two = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": None}]
    places, values = mean_curve([one, two], "loss", "step")
    assert places == [1, 2]
    assert values[0] == 3.0 and np.isnan(values[1])


def test_a_running_mean_looks_back_only(modules):
    running_mean = modules("convergence_plot").running_mean
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


# PowerSGD.


TORCHS_SEED = int(np.random.RandomState(0).randint(1_000_000_000))  # as its state draws it


def train_with_powersgd(PowerSGD, model, comm):
    power = PowerSGD(model.parameters(), comm, rank=job.RANK, seed=TORCHS_SEED)
    optimizer = job.make_optimizer(model)
    for step in range(job.STEPS):
        optimizer.zero_grad()
        job.backward(model, comm.rank, step)
        if step < job.DENSE_STEPS:
            for parameter in model.parameters():
                parameter.grad = ddl.allreduce_mean(parameter.grad)
        else:
            power.aggregate()
        optimizer.step()
    return model


def test_powersgd_is_that_of_torchs_own_hook(modules, tmp_path):
    PowerSGD = modules("convergence_powersgd").PowerSGD
    first = job.make_model().state_dict()
    models = [job.make_model() for _ in range(2)]  # made before there are threads
    done = torchrun(2, [job.__file__, str(tmp_path / "model.pt")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    torchs = torch.load(tmp_path / "model.pt", weights_only=True)
    one, two = threads.run(2, lambda comm: train_with_powersgd(PowerSGD, models[comm.rank], comm))
    assert ddl.parameters_digest(one) == ddl.parameters_digest(two)
    for name, parameter in one.named_parameters():
        moved = (torchs[name] - first[name]).norm()
        assert (parameter - torchs[name]).norm() < 1e-4 * moved, name


def test_powersgd_loses_nothing(modules):
    """Sum of gradients and old errors = P * average + sum of new errors."""
    PowerSGD = modules("convergence_powersgd").PowerSGD
    P = 3

    def train(comm):
        parameter = nn.Parameter(torch.zeros(30, 40))
        power = PowerSGD([parameter], comm, rank=2, seed=1)
        generator = torch.Generator().manual_seed(comm.rank)
        gradients, averages = torch.zeros(30, 40), torch.zeros(30, 40)
        for _ in range(4):
            parameter.grad = torch.randn(30, 40, generator=generator)
            gradients += parameter.grad
            power.aggregate()
            averages += parameter.grad
        return gradients, averages, power._factored[0].error

    gradients, averages, errors = (
        torch.stack(parts) for parts in zip(*threads.run(P, train), strict=True)
    )
    torch.testing.assert_close(
        gradients.sum(0), P * averages[0] + errors.sum(0), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(averages[0], averages[1])
