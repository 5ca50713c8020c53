"""The benchmark of training measures every part, on one rank and on two, and says what it found."""

import importlib
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from ddl.comm import SingleCommunicator
from ddl.perfmodel import networks
from ddl.perfmodel.iteration import IterationProfile, LayerProfile
from ddl.workloads.fcn import FullyConnected

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "bench_training.py"
SHORT = ("--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2")
TINY = (*SHORT, "--batch-size", "2", "--image-size", "8", "--threads", "1")
PARTS = {"t_io", "t_h2d", "t_f", "t_b", "exposed", "t_u", "iteration"}
KEYS = {
    *("model", "batch_size", "size", "compressor", "density", "overlap", "data", "prefetch"),
    *("pin_memory", "cudnn_benchmark", "channels_last", "parameters", "measured", "silent"),
    *(
        "alone",
        "efficiency",
        "efficiency_by_turns",
        "efficiency_alone",
        "predicted",
        "buckets",
        "bytes_sent_per_step",
    ),
    *("bytes_dense_per_step", "skipped_steps", "parameters_agree", "P", "hosts", "transport"),
    *("device", "threads", "torch", "cpu", "cores"),
}


@pytest.fixture
def modules(monkeypatch):
    """Import modules of the benchmarks by name; torch's settings are put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads, autotune = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield importlib.import_module
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = autotune


def rows_of(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def check_row(row: dict) -> None:
    """What is so on any machine, however noisy."""
    assert row.keys() == KEYS
    assert row["measured"].keys() == PARTS | {"t_s", "t_c", "per_worker", "total"}
    for name in ("silent", "alone"):
        if row[name] is not None:
            assert row[name].keys() == PARTS | {"per_worker", "total"}
    for found in (row["measured"], row["silent"], row["alone"] or {}):
        for name in PARTS & found.keys():
            assert 0 <= found[name]["low"] <= found[name]["median"] <= found[name]["high"]
    real, silent = (row[name]["iteration"]["median"] for name in ("measured", "silent"))
    assert row["efficiency"] == silent / real > 0
    turns = row["efficiency_by_turns"]
    assert 0 < turns["low"] <= turns["median"] <= turns["high"]
    assert 0 < row["predicted"]["wfbp"] <= row["predicted"]["naive"]
    assert row["parameters_agree"] is True and row["skipped_steps"] == 0


def test_one_process_measures_every_part_and_writes_a_row(modules, tmp_path, capsys):
    flags = ("--models", "resnet20", *TINY, "--channels-last", "--compressor", "none")
    main = modules("bench_training").main
    assert main([*flags, "--json", str(tmp_path / "rows.jsonl")]) == 0
    (row,) = rows_of(tmp_path / "rows.jsonl")
    check_row(row)
    assert (row["P"], row["batch_size"], row["size"], row["alone"]) == (1, 2, 8, None)
    assert row["parameters"] == networks.resnet20().numel
    out = capsys.readouterr().out
    assert "Img/sec per worker: " in out and "Total img/sec on 1 worker(s): " in out
    assert "exposed of both" in out and "predicted: naive " in out and "note:" not in out


@pytest.mark.mpi
def test_two_ranks_measure_effects_and_one_that_trains_alone(mpirun, tmp_path):
    file = tmp_path / "rows.jsonl"
    effects = ("--single-first", "--data", "digits", "--prefetch", "1", "--no-overlap")
    command = [str(SCRIPT), "--models", "resnet20", "fcn", *TINY, *effects, "--json", str(file)]
    done = mpirun(2, command)
    assert done.returncode == 0, done.stderr
    rows = rows_of(file)
    assert [row["model"] for row in rows] == ["resnet20", "fcn"]
    for row in rows:
        check_row(row)
        single, real = (row[name]["iteration"]["median"] for name in ("alone", "measured"))
        assert row["efficiency_alone"] == single / real
        assert (row["P"], row["hosts"], row["overlap"], row["data"]) == (2, 1, False, "digits")
        assert 0 < row["bytes_sent_per_step"] < 0.01 * row["bytes_dense_per_step"]
    assert done.stdout.count("Total img/sec on 2 worker(s): ") == 2
    assert done.stdout.count("note: the 2 ranks of this host") == 1


def test_the_lstm_counts_sequences(modules, tmp_path, capsys):
    short = ("--num-warmup-batches", "0", "--num-batches-per-iter", "1", "--num-iters", "1")
    flags = ("--models", "lstm", "--batch-size", "1", "--threads", "1", *short)
    assert modules("bench_training").main([*flags, "--json", str(tmp_path / "rows.jsonl")]) == 0
    check_row(rows_of(tmp_path / "rows.jsonl")[0])
    assert "Total seq/sec on 1 worker(s): " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--models", "resnet51"), "invalid choice"),
        (("--density", "2"), "expected a density in (0, 1]"),
        (("--batch-size", "0"), "a whole number of 1 or more"),
        (("--prefetch", "-1"), "a whole number of 0 or more"),
        (("--compressor", "gtop"), "invalid choice"),
        (("--json", "nowhere/rows.jsonl"), "make it first"),
        (("--models", "alexnet", "--image-size", "8"), "choose another --image-size"),
        (("--models", "fcn", "--data", "fashion-mnist", "--data-dir", "nowhere"), "not a folder"),
    ],
)
def test_bad_input_is_one_line(modules, capsys, flags, words):
    with pytest.raises(SystemExit, match="2"):
        modules("bench_training").main(list(flags))
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_of_torchruns_ranks_only_the_first_says_what_is_wrong(modules, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            modules("bench_training").main(["--density", "2"])
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_without_torchvision_one_line_says_which_models_there_are(modules, capsys, monkeypatch):
    monkeypatch.setattr(modules("training_models"), "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        modules("bench_training").main(["--models", "resnet20", "alexnet"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install torchvision, or choose among resnet20, fcn, lstm" in line


def test_without_overlap_the_same_buckets_are_sent_after_the_backward_pass(modules, monkeypatch):
    monkeypatch.setenv("DDL_FUSION_THRESHOLD", "4000")
    bench_training = modules("bench_training")
    launched = []
    for flag in ("--overlap", "--no-overlap"):
        args = bench_training.parse(["--models", "resnet20", "--threads", "1", flag])
        model = FullyConnected((8, 64, 32, 4))
        optimizer = bench_training.Bench(SingleCommunicator(), args)._distributed(model)
        model(torch.randn(2, 8)).sum().backward()
        ended = time.perf_counter()
        optimizer.synchronize()
        buckets = optimizer.metrics.buckets
        launched.append([(bucket.name, bucket.numel) for bucket in buckets])
        optimizer.close()
    assert launched[0] == launched[1] and len(launched[0]) == 3
    assert all(bucket.outcome.started > ended for bucket in buckets)


def test_a_gpus_clock_reads_its_stream_in_seconds(modules, monkeypatch):
    class Event:
        reached = iter((5.0, 8.0, 8.5))  # milliseconds

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(self.reached)

        def elapsed_time(self, end):
            return end.at - self.at

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda", 0)
    clock = modules("training_clock").Clock(device)
    moments = [clock.now() for _ in range(3)]
    assert not waited
    clock.settle()
    assert waited == [device] and clock.laps(moments) == [0.003, 0.0005]


def test_means_over_ranks_come_before_medians_over_iterations(modules):
    loop = modules("training_loop")

    def samples(seconds: list[float], rates: list[float]):
        parts = [dict.fromkeys(loop.LAPS, second) for second in seconds]
        buckets = [[loop.BucketTimes(10, second, 2 * second)] for second in seconds]
        return loop.Samples(parts, rates, [[second, 2.0] for second in seconds], buckets)

    ranks = [samples([1.0, 5.0, 2.0], [10.0, 20.0]), samples([3.0, 1.0, 2.0], [30.0, 20.0])]
    measured = loop.Measured.of(ranks)
    assert measured.parts["t_f"].median == 2.0 and measured.parts["t_f"].high == 2.5
    assert measured.iteration == 6 * 2.0
    assert measured.ready == [2.0, 2.0] and measured.buckets == [(10, 2.0, 4.0)]
    assert measured.total == (40.0, 0.0) and measured.rates == [20.0, 20.0]
    assert measured.per_worker.mean == 20.0 and measured.per_worker.margin > 0


def test_predictions_hide_what_the_backward_pass_can_hide(modules):
    predict = modules("training_prediction").predict
    BucketTimes = modules("training_loop").BucketTimes
    layers = (LayerProfile("a", 5, 1.0, 4.0), LayerProfile("b", 3, 0.0, 2.0))
    measured = IterationProfile(layers, t_io=0.5, t_h2d=0.25, t_u=0.25)
    buckets = [BucketTimes(3, 1.0, 2.0), BucketTimes(5, 0.5, 1.0)]
    found = predict(measured, buckets)
    assert found["naive"] == 0.5 + 0.25 + 1.0 + 6.0 + 4.5 + 0.25
    assert found["wfbp"] == found["naive"] - 3.0  # the first bucket travels behind layer a
    whole = predict(measured, [BucketTimes(8, 1.5, 3.0)])
    assert whole["wfbp"] == whole["naive"] == found["naive"]


def test_a_profile_lasts_as_long_as_what_was_measured(modules):
    loop, prediction = modules("training_loop"), modules("training_prediction")
    parts = [dict.fromkeys(loop.LAPS, 4.0)]
    ready = [[3.9, 3.0, 3.5, 1.0]]  # the second gradient came before the third
    measured = loop.Measured.of([loop.Samples(parts, [1.0], ready)])
    profile = prediction.profile(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), measured, 7)
    assert [layer.t_b for layer in profile.layers] == [0.5, 0.0, 2.5, 1.0]
    assert (profile.t_f, profile.t_b, profile.batch, profile.numel) == (4.0, 4.0, 7, 13)


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("alexnet", networks.alexnet()),
        ("vgg16", networks.vgg16()),
        ("resnet50", networks.resnet50()),
        ("resnet20", networks.resnet20()),
        ("fcn", networks.fully_connected()),
        ("lstm", networks.lstm_ptb()),
    ],
)
def test_models_are_those_whose_costs_are_predicted(modules, name, network):
    model = modules("training_models").MODELS[name]
    with torch.device("meta"):
        made = model.make(model.gpu.size)
    assert sum(parameter.numel() for parameter in made.parameters()) == network.numel


@pytest.mark.parametrize(
    ("source", "name"), [("synthetic", "resnet20"), ("digits", "fcn"), ("synthetic", "lstm")]
)
def test_batches_have_the_shape_of_the_model_and_differ_by_rank(modules, source, name):
    data, channels = modules("training_data"), modules("training_models").MODELS[name].channels
    dataset = data.make_dataset(source, name, 12, Path("nowhere"))
    batches = [next(iter(data.make_loader(dataset, 3, rank, 0, False))) for rank in (0, 0, 1)]
    (inputs, targets), (again, _), (other, _) = batches
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    if channels:
        assert inputs.shape == (3, channels, 12, 12) and inputs.abs().max() <= 1
        assert targets.shape == (3,) and targets.dtype == torch.int64
    else:
        assert inputs.shape == targets.shape == (3, 35)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
