"""A run that was saved and resumed is the run that was not interrupted."""

import json
import logging
import random
import shutil

import numpy as np
import pytest
import torch
from laws import SPARSE_COMPRESSORS
from torch import nn
from toy import backward, sgd

import ddl
from ddl.checkpoint import files
from ddl.comm import threads
from ddl.errors import DDLError, DisagreementError
from ddl.reduction import agreement

STEPS, SAVED_AT, STEPS_PER_EPOCH = 60, 37, 20
KINDS = [("none", None, None, None), *SPARSE_COMPRESSORS, ("gtopk", "auto", "plain", None)]
OPTIMIZERS = {
    "sgd": lambda model: sgd(model, weight_decay=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


class Run:
    """Training whose every part has a state: batch norm, momentum, a schedule, a warm-up."""

    def __init__(self, comm, kind=KINDS[0], optimizer="sgd", **kwargs):
        name, collective, wire, winners_per_pick = kind
        self.rank, density = comm.rank, 0.1
        generator = torch.Generator().manual_seed(comm.rank)
        self.model = nn.Sequential(
            nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 8), nn.Linear(8, 3)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.optimizer = ddl.DistributedOptimizer(
            OPTIMIZERS[optimizer](self.model),
            self.model.named_parameters(),
            compressor=name,
            collective=collective,
            wire=wire,
            global_density=winners_per_pick and density * winners_per_pick,
            density=density,
            density_warmup=ddl.DensityWarmup((0.5, 0.2)),
            **{"bucket_bytes": 450, "dense_below": 4, **kwargs},
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=9, gamma=0.8)

    @property
    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def go(self, first, last):
        for step in range(first, last):
            if step % STEPS_PER_EPOCH == 0:
                self.optimizer.set_epoch(step // STEPS_PER_EPOCH)
            self.optimizer.zero_grad()
            backward(self.model, self.rank, step)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, directory, step, **kwargs):
        return ddl.save_checkpoint(directory, **self.objects, step=step, **kwargs)

    def load(self, path):
        self.restored = ddl.load_checkpoint(path, **self.objects)
        return self

    def bits(self):
        """All that makes a run go on as it does, as one string of bytes."""
        states = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            states += [value for value in state.values() if value is not None]
        states += [r for r in residuals(self) if r is not None]
        numbers = [self.optimizer.density, self.scheduler.get_last_lr(), self.optimizer.epoch]
        return b"".join(t.numpy().tobytes() for t in states) + repr(numbers).encode()

    def close(self):
        self.optimizer.close()


def residuals(run):
    return [aggregator.residual for _, aggregator in run.optimizer.reducer.owing]


def owed(run):
    """float64, by the names of parameters: this rank's share of what is owed."""
    shares = {}
    for bucket, aggregator in run.optimizer.reducer.owing:
        whole = torch.zeros(bucket.flat.numel(), dtype=torch.float64)
        if aggregator.residual is not None:
            whole[aggregator.first :][: aggregator.residual.numel()] = aggregator.residual
        for place, member in enumerate(bucket.members):
            shares[member.name] = bucket.part(whole, place)
    return shares


def owed_by_all(runs):
    shares = [owed(run) for run in runs]
    return {name: sum(share[name] for share in shares) for name in shares[0]}


def written(P, directory, steps=SAVED_AT, **kwargs):
    """Train, save, and return the runs of all ranks."""

    def work(comm):
        run = Run(comm, **kwargs).go(0, steps)
        run.save(directory, steps)
        run.close()
        return run

    return threads.run(P, work)


def resumed(P, path, steps=SAVED_AT, **kwargs):
    """Load and train on."""

    def work(comm):
        run = Run(comm, **kwargs).load(path).go(SAVED_AT, steps)
        run.close()
        return run

    return threads.run(P, work)


@pytest.fixture
def nodes_of_two(monkeypatch):
    nodes_of = lambda comm: tuple(rank // 2 for rank in range(comm.size))  # noqa: E731
    monkeypatch.setattr(agreement, "find_nodes", nodes_of)


def same_as_never_interrupted(P, tmp_path, **kwargs):
    def work(comm):
        run = Run(comm, **kwargs).go(0, SAVED_AT)
        run.save(tmp_path, SAVED_AT)  # which changes nothing, see below
        run.go(SAVED_AT, STEPS).close()
        again = Run(comm, **kwargs).load(tmp_path)
        assert again.restored.step == SAVED_AT
        again.go(SAVED_AT, STEPS).close()
        assert again.bits() == run.bits()

    threads.run(P, work)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(kind, optimizer, tmp_path, monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "1e-4,1e-7")
    P = {"sgd": 3, "adam": 2}[optimizer]
    same_as_never_interrupted(P, tmp_path, kind=kind, optimizer=optimizer)


@pytest.mark.parametrize("kind", [("gtopk", "exact", "plain", None), ("randomk", None, None, None)])
def test_two_levels_resume_to_the_bit(kind, tmp_path, nodes_of_two):
    same_as_never_interrupted(4, tmp_path, kind=kind, hierarchical=True)


def test_saving_changes_nothing(tmp_path):
    def work(comm, save):
        run = Run(comm, ("gtopk", None, None, None)).go(0, 10)
        if save:
            run.save(tmp_path, 10)
        run.go(10, 20).close()
        return run.bits()

    assert threads.run(2, lambda comm: work(comm, True)) == threads.run(
        2, lambda comm: work(comm, False)
    )


@pytest.mark.parametrize(
    ("P", "levels"),
    [
        *((P, (old, new)) for P in (2, 6) for old in (False, True) for new in (False, True)),
        (4, (False, True)),
        (4, (True, False)),
    ],
)
def test_on_other_ranks_the_average_owed_is_the_same_and_training_goes_on(
    P, levels, tmp_path, nodes_of_two
):
    kind = ("gtopk", "butterfly", "plain", None)
    before = owed_by_all(written(4, tmp_path, 8, kind=kind, hierarchical=levels[0]))

    def work(comm):
        run = Run(comm, kind, hierarchical=levels[1]).load(tmp_path)
        taken_up = owed(run)
        run.go(8, 12).close()
        return run, taken_up, ddl.parameters_digest(run.model)

    results = threads.run(P, work)
    for name, total in before.items():
        taken_up = sum(share[name] for _, share, _ in results)
        torch.testing.assert_close(taken_up / P, total / 4, rtol=1e-6, atol=1e-7)
    assert any(total.any() for total in before.values())
    assert len({digest for *_, digest in results}) == 1
    assert results[0][0].restored.P == 4


def test_each_residual_goes_to_the_old_rank_modulo_P(tmp_path):
    kind = ("topk", None, None, None)
    before = [owed(run) for run in written(4, tmp_path, 8, kind=kind)]
    shares = [owed(run) for run in resumed(6, tmp_path, kind=kind)]
    for name in before[0]:
        for rank in range(4):
            expected = (before[rank][name].float() * 1.5).double()
            assert torch.equal(shares[rank][name], expected)
        assert not shares[4][name].any() and not shares[5][name].any()


def test_a_change_is_told_in_one_line(tmp_path, caplog):
    written(4, tmp_path, steps=3, kind=("topk", None, None, None))
    with caplog.at_level(logging.WARNING, "ddl"):
        resumed(2, tmp_path, kind=("gtopk", None, None, None))
        resumed(4, tmp_path, kind=("none", None, None, None))
    text = [r.getMessage() for r in caplog.records if "checkpoint" in r.name]
    assert sum("4 ranks wrote it, 2 go on" in line and "times 2/4" in line for line in text) == 1
    assert any("compressor gtopk, was topk" in line for line in text)
    assert any("now sent whole" in line and "dropped" in line for line in text)


def test_parameters_may_change_their_order_in_memory(tmp_path):
    shape = (4, 3, 2, 2)

    def work(comm, write):
        model = nn.Conv2d(3, 4, 2)
        if not write:
            model = model.to(memory_format=torch.channels_last)
        optimizer = ddl.DistributedOptimizer(sgd(model), model.named_parameters(), density=0.05)
        if write:
            model(torch.randn(2, 3, 2, 2)).square().sum().backward()
            optimizer.step()
            ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        [(bucket, aggregator)] = optimizer.reducer.owing
        place = [member.name for member in bucket.members].index("weight")
        flat = bucket.part(aggregator.residual, place)
        optimizer.close()
        return flat.view(shape) if write else flat.view(4, 2, 2, 3).permute(0, 3, 1, 2)

    [before] = threads.run(1, lambda comm: work(comm, True))
    [after] = threads.run(1, lambda comm: work(comm, False))
    assert before.any() and torch.equal(before, after)


def test_random_states_are_restored(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    draw = lambda: (random.random(), np.random.rand(), torch.rand(3).tolist())  # noqa: E731

    def work(comm):
        ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        first = draw()
        ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        return first, draw()

    [(first, second)] = threads.run(1, work)
    assert first == second


def test_several_models_and_optimizers_a_scaler_and_extra_go_by_name(tmp_path):
    class Gan:
        def __init__(self, seed):
            torch.manual_seed(seed)
            self.models = {"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)}
            self.optimizers = {
                name: ddl.DistributedOptimizer(sgd(model), model.named_parameters(), density=0.3)
                for name, model in self.models.items()
            }
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + seed))

        def step(self):
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
                fake = self.models["g"](torch.ones(2, 3))
                self.models["d"](fake).square().mean().backward()
                optimizer.step()

        def objects(self):
            return {"model": self.models, "optimizer": self.optimizers, "scaler": self.scaler}

    def work(comm):
        gan, other = Gan(0), Gan(1)
        gan.step()
        gan.scaler.scale(torch.ones(1))  # makes its scale
        with pytest.raises(
            DDLError, match=r"'g' has gradients that no step has applied.*zero_grad"
        ):
            ddl.save_checkpoint(tmp_path, **gan.objects())
        for optimizer in gan.optimizers.values():
            optimizer.zero_grad()
        extra = {"best": 0.5, "names": ("a", None), "count": np.float64(3)}
        ddl.save_checkpoint(tmp_path, **gan.objects(), epoch=2, step=5, position=64, extra=extra)
        restored = ddl.load_checkpoint(tmp_path, **other.objects())
        assert (restored.epoch, restored.step, restored.position) == (2, 5, 64)
        assert restored.extra == {"best": 0.5, "names": ("a", None), "count": 3.0}
        assert other.scaler.get_scale() == 8.0
        gan.step(), other.step()
        for name, model in gan.models.items():
            assert ddl.parameters_digest(model) == ddl.parameters_digest(other.models[name])
        for optimizer in [*gan.optimizers.values(), *other.optimizers.values()]:
            optimizer.close()

    threads.run(2, work)


def test_a_step_under_way_is_refused_on_every_rank(tmp_path):
    def work(comm):
        run = Run(comm)
        backward(run.model, comm.rank, 0)
        for act in (lambda: run.save(tmp_path, 0), lambda: run.load(tmp_path)):
            with pytest.raises(DDLError, match="no step has applied, expected none; call its step"):
                act()
        run.optimizer.synchronize()
        with pytest.raises(DDLError, match="no step has applied"):
            run.save(tmp_path, 0)
        run.optimizer.step()
        run.save(tmp_path, 1)
        run.close()

    threads.run(2, work)


def test_ranks_that_save_different_steps_are_told_so(tmp_path):
    def work(comm):
        run = Run(comm)
        with pytest.raises(DisagreementError, match=r"rank 1 saves at \(0, 1, 0\)"):
            run.save(tmp_path, comm.rank)
        run.close()

    threads.run(2, work)


# On the disk.


def message(path, P=1, **kwargs):
    """Why a checkpoint is refused; every rank has to say the same, and nothing may change."""

    def work(comm):
        run = Run(comm, **kwargs)
        before = run.bits()
        with pytest.raises(DDLError) as caught:
            run.load(path)
        assert run.bits() == before
        run.close()
        return str(caught.value)

    [text] = set(threads.run(P, work))
    return text


def test_a_checkpoint_is_plain_tensors_by_name(tmp_path):
    kind = ("gtopk", None, None, None)
    [run, _] = written(2, tmp_path, kind=kind)
    folder = tmp_path / "0001-step-37"
    job = torch.load(folder / "job.pt", weights_only=True)
    shard = torch.load(folder / "rank-0.pt", weights_only=True)
    assert torch.equal(job["models"]["model"]["state"]["0.weight"], run.model[0].weight)
    piece = shard["residuals"]["optimizer"]["0.weight"]
    assert torch.equal(piece["values"].double(), owed(run)["0.weight"])
    assert json.loads((folder / "manifest.json").read_text())["P"] == 2
    assert not list(tmp_path.glob(".saving-*"))


def test_the_newest_complete_one_is_taken_and_old_ones_go(tmp_path):
    def work(comm):
        run = Run(comm)
        for step in (5, 9, 7):  # the newest is the one written last
            run.save(tmp_path, step, keep=2)
        assert run.load(tmp_path).restored.step == 7
        assert run.load(tmp_path / "0002-step-9").restored.step == 9
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0002-step-9", "0003-step-7"]
        (tmp_path / "0003-step-7" / "rank-0.pt").unlink()
        assert run.load(tmp_path).restored.step == 9
        run.close()

    threads.run(1, work)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_fails_leaves_the_former_one(victim, tmp_path, monkeypatch):
    whole = files.write

    def full(path, content):
        if path.name == files.shard(victim):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return whole(path, content)

    def work(comm):
        run = Run(comm).go(0, 2)
        run.save(tmp_path, 2)
        run.go(2, 4)
        ddl.barrier()
        monkeypatch.setattr(files, "write", full)
        ddl.barrier()
        with pytest.raises(DDLError, match=f"rank {victim} of 2: OSError.*No space left"):
            run.save(tmp_path, 4)
        ddl.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["0001-step-2"]
        assert run.load(tmp_path).restored.step == 2
        ddl.barrier()
        monkeypatch.setattr(files, "write", whole)
        ddl.barrier()
        if comm.rank == 0:
            (tmp_path / ".saving-0002").mkdir()  # as one that was killed
        run.save(tmp_path, 6)
        assert run.load(tmp_path).restored.step == 6
        run.close()

    threads.run(2, work)


def test_what_is_not_plain_is_refused_before_it_is_written(tmp_path):
    def work(comm):
        run = Run(comm)
        with pytest.raises(DDLError, match=r"extra\['x'\]\[1\] is a object, expected numbers"):
            run.save(tmp_path, 0, extra={"x": [1, object()]})
        run.close()

    threads.run(2, work)
    assert not list(tmp_path.iterdir())


def damage_nothing_there(folder):
    shutil.rmtree(folder)


def damage_foreign(folder):
    (folder / "manifest.json").write_text('{"format": "another"}')


def damage_version(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"version": 1', '"version": 99'))


def damage_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def damage_cut(folder):
    path = folder / "rank-1.pt"
    path.write_bytes(path.read_bytes()[:-1])


def damage_bit(folder):
    path = folder / "rank-1.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_mixed(folder):
    first, second = folder / "rank-0.pt", folder / "rank-1.pt"
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_nothing_there, ["no complete checkpoint in", "there is none", "check the path"]),
        (damage_foreign, ["manifest.json", "not that of a ddl checkpoint", "expected a folder"]),
        (damage_version, ["format version 99, expected 1", "version of ddl that wrote it"]),
        (damage_manifest, ["manifest.json", "cannot be read", "expected a folder"]),
        (damage_cut, ["rank-1.pt", "bytes, expected", "bytes"]),
        (damage_bit, ["rank-1.pt", "SHA-256", "expected", "damaged", "load an older one"]),
        (damage_mixed, ["rank-1.pt", "expected"]),
    ],
)
def test_a_damaged_or_foreign_one_is_refused_with_a_reason(damage, words, tmp_path):
    written(2, tmp_path, steps=1)
    damage(tmp_path / "0001-step-1")
    text = message(tmp_path, P=2)
    for word in words:
        assert word in text


def test_other_objects_are_refused_by_name(tmp_path):
    written(1, tmp_path, steps=1)
    assert "optimizers['optimizer'] is a SGD, expected a Adam" in message(
        tmp_path, optimizer="adam"
    )

    def work(comm):
        model = nn.Linear(6, 10)
        optimizer = ddl.DistributedOptimizer(sgd(model), model.named_parameters())
        complaints = []
        for objects in (
            {"model": model, "optimizer": optimizer},
            {"model": model, "optimizer": optimizer, "scheduler": Run(comm).scheduler},
            {"model": {"m": model}, "optimizer": optimizer},
        ):
            with pytest.raises(DDLError) as caught:
                ddl.load_checkpoint(tmp_path, **objects)
            complaints.append(str(caught.value))
        return complaints

    [[schedulers, shapes, models]] = threads.run(1, work)
    assert "has schedulers 'scheduler', expected none; give load_checkpoint the same" in schedulers
    assert (
        "model 'model' has nothing for 'weight', expected torch.float32 of shape (10, 6)" in shapes
    )
    assert "has models 'model', expected 'm'" in models


def test_a_parameter_that_is_frozen_now_is_refused(tmp_path):
    def work(comm, write):
        model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        optimizer = ddl.DistributedOptimizer(sgd(model), model.named_parameters())
        if write:
            model[0].requires_grad_(True)
            backward(model, comm.rank, 0)
            optimizer.step()
            ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            with pytest.raises(DDLError, match=r"'0\.bias'.*frozen.*unfreeze the same"):
                ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
            model[0].requires_grad_(True)
            ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        optimizer.close()

    threads.run(2, lambda comm: work(comm, True))
    threads.run(2, lambda comm: work(comm, False))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"keep": 0}, "keep must be at least 1 or None, got 0"), ({"model": 3}, "'model' is a int")],
)
def test_bad_arguments_are_refused(arguments, words, tmp_path):
    model = nn.Linear(1, 1)

    def work(comm):
        with pytest.raises(ValueError, match=words):
            ddl.save_checkpoint(tmp_path, **{"model": model, "optimizer": sgd(model), **arguments})

    threads.run(1, work)
