"""The digits are those of scikit-learn, and a missing package is one line."""

import pytest
import torch

from ddl.workloads import digits


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    images, labels = digits.read_digits()
    theirs = load_digits()
    assert images.shape == (1797, 8, 8) and images.dtype == torch.uint8
    assert torch.equal((images.double() * 16 / 255).round(), torch.from_numpy(theirs.images))
    assert labels.tolist() == theirs.target.tolist()


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        digits.read_digits()
