"""sparse_hook in torch's DDP: laws on real processes, and what it refuses without any."""

import functools
import pickle

import pytest
import torch
from ddp_hook_laws import LAWS
from launch import ROOT, torchrun
from toy import make_model

import ddl


@functools.cache
def job(P):
    return torchrun(P, [str(ROOT / "tests" / "engine" / "ddp_hook_laws.py")], timeout=240)


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("law", [law.__name__ for law in LAWS])
def test_under_ddp(law, P):
    done = job(P)
    assert law in done.stdout.splitlines(), done.stderr[-3000:]


@pytest.mark.parametrize("P", [2, 3])
def test_the_job_ends_well(P):
    assert job(P).returncode == 0, job(P).stderr[-3000:]


def test_bad_arguments_are_refused_with_the_cure():
    model = make_model()
    for kwargs, message in (
        ({"density": 1.5}, "density must lie in"),
        ({"compressor": "zip"}, "compressor must be one of"),
        ({"compressor": "none", "wire": "plain"}, "has no choice of wire"),
        ({"dense_below": -1}, "dense_below must be a number of elements"),
    ):
        with pytest.raises(ValueError, match=message):
            ddl.SparseHookState(model, **kwargs)
    with pytest.raises(ValueError, match=r"pass the model, or model\.named_parameters\(\)"):
        ddl.SparseHookState(model.parameters())
    state = ddl.SparseHookState(model.named_parameters())
    with pytest.raises(ValueError, match="density must lie in"):
        state.density = 0
    state.density = 0.5
    assert state.density == 0.5


def test_a_pickled_state_keeps_settings_and_residuals_and_refuses_another_model():
    state = ddl.SparseHookState(make_model(), "randomk", 0.25, seed=3, dense_below=4)
    state.step = 7
    state._owed = {"0.weight": torch.ones(10, 6)}
    copy = pickle.loads(pickle.dumps(state))
    assert (copy.density, copy.step, copy._choices) == (0.25, 7, state._choices)
    assert copy.residuals()["0.weight"].sum() == 60
    with pytest.raises(ValueError, match=r"'0\.weight' of shape \(10, 6\), the model has none"):
        copy.attach(torch.nn.Linear(2, 2))
    copy.attach(make_model())
    saved = state.__getstate__()
    saved["format"] = 9
    with pytest.raises(ValueError, match="format 9, expected 1"):
        copy.__setstate__(saved)
