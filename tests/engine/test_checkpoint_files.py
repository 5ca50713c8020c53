"""Checkpoints on the disk: written aside, plain, refused with a reason where they do not fit."""

import json
import shutil

import pytest
import torch
from checkpoint_runs import Run, owed, written
from torch import nn
from toy import backward, sgd

import ddl
from ddl.checkpoint import files
from ddl.comm import threads
from ddl.errors import DDLError


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
    piece = shard["residual"]["optimizer"]["0.weight"]
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


def test_no_checkpoint_at_all_is_an_error_of_its_own(tmp_path):
    def work(comm):
        run = Run(comm)
        with pytest.raises(ddl.NoCheckpointError, match="there is none"):
            run.load(tmp_path)
        run.close()

    threads.run(2, work)
    written(1, tmp_path, steps=1)
    damage_manifest(tmp_path / "0001-step-1")

    def damaged(comm):
        run = Run(comm)
        with pytest.raises(DDLError) as caught:
            run.load(tmp_path)
        assert not isinstance(caught.value, ddl.NoCheckpointError)
        run.close()

    threads.run(1, damaged)
