"""Diagnostics: laws of what they measure, and that nobody notices them."""

import json
import math

import pytest
import torch
import toy

import ddl
from ddl.comm import threads
from ddl.diagnostics import Diagnostics, plot
from ddl.perfmodel import plans
from ddl.reduction import planning


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take longer than the runs."""
    monkeypatch.setattr("ddl.diagnostics.watch.plot", lambda directory: None)


def read(directory):
    lines = (directory / "diagnostics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def watch(comm, directory, steps=5, every=2, whole_buckets=False, **kwargs):
    """Trains, watched on rank 0; returns the model and the residuals."""
    model = toy.make_model(seed=comm.rank)
    optimizer = toy.wrap(model, **kwargs)
    diagnostics = None
    if directory is not None and comm.rank == 0:
        diagnostics = Diagnostics(
            optimizer, every=every, directory=directory, whole_buckets=whole_buckets
        )
    for step in range(steps):
        optimizer.zero_grad()
        toy.backward(model, comm.rank, step)
        optimizer.step()
    residuals = [aggregator.residual for _, aggregator in optimizer.reducer.owing]
    optimizer.close()
    if diagnostics:
        diagnostics.close()
    return model, residuals


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"compressor": "topk", "wire": "compact"},
        {"compressor": "gaussiank-gtopk", "collective": "exact"},
        {"compressor": "randomk"},
        {"collective": "auto", "bucket_bytes": 200},
        {"error_feedback": False},
    ],
    ids=str,
)
def test_watching_does_not_change_training_by_a_bit(tmp_path, kwargs, monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "1e-4,1e-6")
    runs = [
        threads.run(3, lambda comm, d=directory: watch(comm, d, **kwargs))
        for directory in (tmp_path, None)
    ]
    watched, alone = ([ddl.parameters_digest(model) for model, _ in run] for run in runs)
    assert watched == alone
    for (_, mine), (_, theirs) in zip(*runs, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    assert read(tmp_path)


def test_every_layer_is_recorded_in_every_sampled_step(tmp_path):
    threads.run(2, lambda comm: watch(comm, tmp_path, steps=5, every=2))
    names = {name for name, _ in toy.make_model().named_parameters()}
    records = read(tmp_path)
    assert {(r["step"], r["layer"]) for r in records} == {(s, n) for s in (0, 2, 4) for n in names}
    assert len(records) == 3 * len(names)


def test_what_is_left_is_what_the_definition_says(tmp_path):
    """With one rank and one step: accumulated is the gradient, and the residual what is left."""

    def train(comm):
        model = toy.make_model()
        optimizer = toy.wrap(model)
        diagnostics = Diagnostics(optimizer, every=1, directory=tmp_path)
        toy.backward(model, 0, 0)
        gradients = {name: p.grad.clone().flatten() for name, p in model.named_parameters()}
        optimizer.step()
        diagnostics.close()
        return gradients

    (gradients,) = threads.run(1, train)
    everything = torch.cat(list(gradients.values()))
    k = round(0.1 * everything.numel())
    threshold = everything.abs().topk(k).values[-1]
    records = {record["layer"]: record for record in read(tmp_path)}
    assert sum(record["picked"] for record in records.values()) == k
    for name, u in gradients.items():
        record, rest = records[name], u.masked_fill(u.abs() >= threshold, 0.0)
        assert record["contraction"] == pytest.approx(float(rest.norm() / u.norm()) ** 2, rel=1e-5)
        assert record["picked"] == int((u.abs() >= threshold).sum())
        assert record["residual_norm"] == pytest.approx(float(rest.norm()), rel=1e-5)
        assert record["gradient"] == record["accumulated"]
        assert record["gradient"]["norm"] == pytest.approx(float(u.norm()), rel=1e-5)
        assert sum(record["gradient"]["counts"]) == u.numel()
        assert record["overlap"] == record["included"] == (1.0 if record["picked"] else None)


def test_the_residual_norm_is_that_of_the_residual(tmp_path):
    results = threads.run(3, lambda comm: watch(comm, tmp_path, steps=3, every=1))
    _, (residual,) = results[0]
    last = [record["residual_norm"] for record in read(tmp_path) if record["step"] == 2]
    assert math.hypot(*last) == pytest.approx(float(residual.norm()), rel=1e-5)


def test_a_whole_bucket_is_the_sum_of_its_layers(tmp_path):
    threads.run(2, lambda comm: watch(comm, tmp_path, every=1, whole_buckets=True))
    records = read(tmp_path)
    wholes = [record for record in records if record["layer"] is None]
    assert [whole["step"] for whole in wholes] == [0, 1, 2, 3, 4]
    for whole in wholes:
        layers = [r for r in records if r["step"] == whole["step"] and r["layer"] is not None]
        for key in ("numel", "picked"):
            assert whole[key] == sum(layer[key] for layer in layers)
        squares = [layer["accumulated"]["norm"] ** 2 for layer in layers]
        assert whole["accumulated"]["norm"] ** 2 == pytest.approx(sum(squares), rel=1e-5)
        left = sum(
            layer["contraction"] * square for layer, square in zip(layers, squares, strict=True)
        )
        assert whole["contraction"] == pytest.approx(left / sum(squares), rel=1e-5)
        assert whole["residual_norm"] == pytest.approx(
            math.hypot(*(layer["residual_norm"] for layer in layers)), rel=1e-5
        )
        assert whole["age"] is None


def test_what_is_dropped_at_a_merge_is_not_included_and_stays_owed(tmp_path):
    threads.run(3, lambda comm: watch(comm, tmp_path, every=1, collective="tree"))
    records = [record for record in read(tmp_path) if record["picked"]]
    assert all(0 <= record["included"] <= record["overlap"] <= 1 for record in records)
    assert any(record["included"] < 1 for record in records)
    threads.run(3, lambda comm: watch(comm, tmp_path, every=1, compressor="topk"))
    assert all(r["included"] == r["overlap"] == 1 for r in read(tmp_path) if r["picked"])


def test_the_ages_of_a_run_are_those_of_its_picks(tmp_path):
    """One rank; what it picks shows as a parameter that moves (without momentum)."""

    def train(comm):
        model = toy.make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = toy.wrap(model, sgd)
        diagnostics = Diagnostics(optimizer, every=1, directory=tmp_path)
        last = {name: torch.full(p.shape, -1) for name, p in model.named_parameters()}
        expected = []
        for step in range(6):
            optimizer.zero_grad()
            toy.backward(model, 0, step)
            optimizer.step()
            for name, p in model.named_parameters():
                last[name][p.grad != 0] = step
                expected.append((step, name, float((step - last[name]).double().mean())))
        diagnostics.close()
        return expected

    (expected,) = threads.run(1, train)
    found = {(r["step"], r["layer"]): r["age"]["mean"] for r in read(tmp_path)}
    for step, name, mean in expected:
        assert found[step, name] == pytest.approx(mean)


def train_with_nan(comm, directory):
    model = toy.make_model()
    optimizer = toy.wrap(model)
    diagnostics = Diagnostics(optimizer, every=1, directory=directory)
    for step in range(3):
        optimizer.zero_grad()
        inputs, labels = toy.batch(comm.rank, step)
        inputs = inputs * float("nan") if step == 1 else inputs
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    diagnostics.close()
    return optimizer.skipped_steps


def test_a_skipped_step_is_not_recorded_and_makes_nothing_younger(tmp_path):
    assert threads.run(1, lambda comm: train_with_nan(comm, tmp_path)) == [1]
    assert {record["step"] for record in read(tmp_path)} == {0, 2}


def test_a_step_after_one_that_a_gradient_scaler_left_out_is_recorded(tmp_path):
    def train(comm):
        model = toy.make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = ddl.DistributedOptimizer(
            sgd, model.named_parameters(), density=0.1, scaler=scaler
        )
        diagnostics = Diagnostics(optimizer, every=1, directory=tmp_path)
        for step in range(5):
            optimizer.zero_grad()
            inputs, labels = toy.batch(comm.rank, step)
            inputs = inputs * float("inf") if step == 2 else inputs
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        diagnostics.close()
        return optimizer.skipped_steps

    assert threads.run(1, train) == [1]
    records = read(tmp_path)
    assert {record["step"] for record in records} == {0, 1, 3, 4}
    picked = [r for r in records if r["step"] == 3 and r["picked"]]
    assert picked and all(r["age"]["never"] < 1 for r in picked)


def test_without_error_feedback_nothing_is_owed(tmp_path):
    threads.run(2, lambda comm: watch(comm, tmp_path, every=1, error_feedback=False))
    assert {record["residual_norm"] for record in read(tmp_path)} == {0.0}


def test_a_watch_that_fails_ends_with_a_warning_and_training_goes_on(tmp_path, caplog, monkeypatch):
    def broken(values):
        raise RuntimeError("no shape")

    monkeypatch.setattr("ddl.diagnostics.watch.shape_of", broken)
    watched, alone = (
        threads.run(2, lambda comm, d=directory: watch(comm, d)) for directory in (tmp_path, None)
    )
    assert all(
        ddl.parameters_digest(one) == ddl.parameters_digest(other)
        for (one, _), (other, _) in zip(watched, alone, strict=True)
    )
    assert read(tmp_path) == []
    ends = [record.getMessage() for record in caplog.records if "diagnostics end" in record.msg]
    assert ends == ["diagnostics end after step 0, training goes on: RuntimeError('no shape')"]


def test_a_full_disk_ends_the_watch_and_not_the_training(tmp_path, caplog, monkeypatch):
    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddl.diagnostics.watch.Output.write", full)
    threads.run(1, lambda comm: watch(comm, tmp_path))
    assert "No space left on device" in caplog.text


def test_a_parameter_without_entries_is_passed_over(tmp_path):
    def train(comm):
        model = torch.nn.Linear(6, 3)
        model.empty = torch.nn.Parameter(torch.zeros(0))
        optimizer = toy.wrap(model)
        diagnostics = Diagnostics(optimizer, every=1, directory=tmp_path)
        inputs, labels = toy.batch(comm.rank, 0)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels) + model.empty.sum()
        loss.backward()
        optimizer.step()
        diagnostics.close()

    threads.run(1, train)
    assert {record["layer"] for record in read(tmp_path)} == {"weight", "bias"}


def test_a_second_watch_is_refused_until_the_first_has_ended(tmp_path):
    def train(comm):
        model = toy.make_model()
        optimizer = toy.wrap(model)
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):
            Diagnostics(optimizer, directory=tmp_path / "file")
        first = Diagnostics(optimizer, every=1, directory=tmp_path / "first")
        with pytest.raises(ValueError, match=r"watched already.*close the other Diagnostics"):
            Diagnostics(optimizer, directory=tmp_path / "second")
        toy.backward(model, 0, 0)
        optimizer.step()
        first.close()
        Diagnostics(optimizer, directory=tmp_path / "second").close()

    threads.run(1, train)
    assert read(tmp_path / "first")


def test_steps_that_send_a_bucket_whole_make_all_of_it_young(tmp_path, monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "1e-4,1e-6")

    def train(comm):
        model = toy.make_model()
        optimizer = toy.wrap(model, collective="auto", density=1.0)
        diagnostics = Diagnostics(optimizer, every=1, directory=tmp_path) if not comm.rank else None
        for step in range(4):
            optimizer.reducer.density = 0.02 if step == 3 else 1.0
            optimizer.zero_grad()
            toy.backward(model, comm.rank, step)
            optimizer.step()
        optimizer.close()
        if diagnostics:
            diagnostics.close()

    threads.run(2, train)
    records = read(tmp_path)
    assert {record["step"] for record in records} == {3}
    assert all(r["age"]["max"] <= 1 and r["age"]["never"] == 0 for r in records)


def test_a_resumed_watch_keeps_the_lines_of_earlier_steps(tmp_path):
    threads.run(1, lambda comm: watch(comm, tmp_path, steps=4, every=1))

    def go_on(comm):
        optimizer = toy.wrap(toy.make_model())
        optimizer.reducer.history = (2, 0, 2)
        Diagnostics(optimizer, directory=tmp_path).close()

    threads.run(1, go_on)
    assert {record["step"] for record in read(tmp_path)} == {0, 1}


def test_the_picture_is_drawn_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("ddl.diagnostics.watch.plot", plot)
    threads.run(1, lambda comm: watch(comm, tmp_path))
    assert (tmp_path / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no records of diagnostics"):
        plot(tmp_path / "elsewhere")


def test_buckets_that_are_planned_anew_are_watched_from_then_on(tmp_path, monkeypatch):
    one_each = lambda seen, sizes, *rest: (plans.layerwise(len(sizes)), 1e6)  # noqa: E731
    monkeypatch.setattr(planning, "choose", one_each)
    monkeypatch.setenv("DDL_LINKS", "1e-4,1e-9")
    threads.run(2, lambda comm: watch(comm, tmp_path, steps=9, every=1, bucket_bytes="auto"))
    buckets = {record["step"]: set() for record in read(tmp_path)}
    for record in read(tmp_path):
        buckets[record["step"]].add(record["bucket"])
    assert [len(buckets[step]) for step in range(9)] == [1] * 5 + [6] * 4


def test_where_nothing_is_sparsified_there_is_nothing_to_watch(tmp_path):
    def train(comm):
        optimizer = toy.wrap(toy.make_model(), compressor="none")
        with pytest.raises(ValueError, match=r"no bucket to watch.*another compressor than none"):
            Diagnostics(optimizer, directory=tmp_path / "new")
        for every in (0, "5"):
            with pytest.raises(ValueError, match=f"integer of at least 1, got {every!r}"):
                Diagnostics(toy.wrap(toy.make_model()), every=every, directory=tmp_path / "new")
        bare = torch.optim.SGD(toy.make_model().parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"watch a ddl.DistributedOptimizer, got SGD; wrap"):
            Diagnostics(bare, directory=tmp_path / "new")

    threads.run(1, train)
    assert not (tmp_path / "new").exists()
