"""Advice from measurement, on one rank and on several; times are never asserted."""

import json

import pytest
import torch
from launch import ROOT, torchrun
from torch import nn

from ddl.advise.__main__ import main
from ddl.advise.arguments import BadInput
from ddl.advise.workloads import load

MODULE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(30, 400), nn.ReLU(), nn.Linear(400, 5))

def make_with_input():
    return make(), torch.randn(6, 30)
"""
QUICK = ["--rounds", "2", "--verify-steps", "1", "--compressors", "none", "gtopk"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder with a module of the user's."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def check(found, P):
    assert found["workers"] == P
    assert found["batch_size"] == 6
    assert [layer["numel"] for layer in found["layers"]] == [12000, 400, 2000, 5]
    assert list(found["predictions"]) == ["none", "gtopk"]
    assert found["recommendation"]["candidate"] in found["predictions"]
    for p in found["predictions"].values():
        assert p["seconds"] > 0
        assert 0 < p["speed_beside"]["backward"] <= 1
    assert all(value >= 0 for value in found["alone"].values())


@pytest.mark.mpi
def test_under_mpirun_predictions_stand_beside_what_real_steps_take(mpirun, module):
    flags = ["--model", "mine:make_with_input", *QUICK, "--verify", "--bucket-bytes", "9000"]
    done = mpirun(2, ["-m", "ddl.advise", *flags, "--json", "found.json"], cwd=module)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("measuring ") and done.stderr.count("\n") == 1
    assert done.stdout.count("compressor ") == 1  # only rank 0 speaks
    assert "measured" in done.stdout and "error" in done.stdout
    found = json.loads((module / "found.json").read_text())
    check(found, 2)
    assert len(found["buckets"]) == 3
    assert found["links"]["alpha_seconds"] > 0
    for p in found["predictions"].values():
        assert p["error"] == pytest.approx(p["seconds"] / p["measured_seconds"] - 1)
        assert p["measured_spread"] >= 0
        assert p["bytes_sent"] > 0


@pytest.mark.mpi
def test_under_torchrun_it_measures_too(module):
    flags = ["--model", "mine:make_with_input", *QUICK, "--json", "found.json"]
    script = module / "start.py"
    script.write_text("from ddl.advise.__main__ import main\nmain()\n")
    done = torchrun(2, [str(script), *flags], cwd=module)
    assert done.returncode == 0, done.stderr
    found = json.loads((module / "found.json").read_text())
    check(found, 2)
    assert "error" not in found["predictions"]["none"]


def test_alone_it_may_imagine_others_on_a_network(module, capsys):
    flags = ["--model", "mine:make_with_input", *QUICK, "--json", "-"]
    main([*flags, "--network", "100e-6,1e-7", "--workers", "16"])
    found = json.loads(capsys.readouterr().out)
    check(found, 16)
    # 30 rounds of 0.1 ms, and 30/16 of 57,620 bytes at 100 ns each.
    expected = 30 * 100e-6 + 30 / 16 * 57_620 * 1e-7
    assert found["predictions"]["none"]["communication_seconds"] > 0.99 * expected


def test_alone_it_says_that_there_is_nothing_to_save(module, capsys):
    main(["--model", "mine:make_with_input", *QUICK])
    assert capsys.readouterr().out.splitlines()[-1].startswith("Stay dense")


@pytest.mark.mpi
def test_imagined_workers_beside_real_ones_are_refused(mpirun, module):
    flags = ["--model", "mine:make", "--network", "10gbe", "--workers", "8"]
    done = mpirun(2, ["-m", "ddl.advise", *flags], cwd=module)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "ddl.advise" in line]
    assert len(lines) == 1 and "--network imagines workers, and there are 2" in lines[0]


def test_a_function_may_return_a_model_alone_which_gets_images(monkeypatch, tmp_path):
    (tmp_path / "pictures.py").write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = load("pictures:make", batch=5, image_size=8)
    assert workload.batch == 5
    assert workload.make_batch().shape == (5, 3, 8, 8)
    with pytest.raises(BadInput, match="cannot be trained on such a batch"):
        load("pictures:make", batch=5, image_size=9)


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        ("nn.Linear(3, 3), torch.ones(7, 3)", 7),
        ("nn.Bilinear(3, 2, 4), (torch.ones(7, 3), torch.ones(7, 2))", 7),
        ("nn.Linear(3, 1), lambda: torch.ones(1, 3)", 1),
        ("nn.LSTM(3, 4), torch.ones(9, 2, 3)", 9),
    ],
)
def test_any_module_whose_outputs_are_tensors_can_be_trained(monkeypatch, tmp_path, module, batch):
    name = f"model{abs(hash(module))}"
    (tmp_path / f"{name}.py").write_text(
        f"import torch\nfrom torch import nn\ndef make():\n    return {module}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = load(f"{name}:make", batch=1, image_size=None)
    assert workload.batch == batch
    assert workload.loss(workload.make_batch()).dim() == 0


def test_a_model_without_parameters_is_refused(monkeypatch, tmp_path):
    (tmp_path / "empty.py").write_text(
        "import torch\nfrom torch import nn\ndef make():\n    return nn.Identity(), "
        "torch.ones(2, 2, requires_grad=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match="has no parameter to train"):
        load("empty:make", batch=1, image_size=None)


def test_resnet20_is_reachable_as_the_help_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    workload = load("ddl.workloads.resnet20:ResNet20", batch=2, image_size=32)
    assert isinstance(workload.model, nn.Module)
    assert sum(p.numel() for p in workload.model.parameters()) == 269_722
    copy = workload.copy()
    with torch.no_grad():
        next(copy.model.parameters()).zero_()
    assert next(workload.model.parameters()).any()
