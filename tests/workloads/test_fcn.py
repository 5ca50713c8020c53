"""The fully connected net takes samples of any shape and refuses to have no layers."""

import pytest
import torch

from ddl.workloads.fcn import FullyConnected


@pytest.mark.parametrize("widths", [(3,), (3, 0)])
def test_a_net_without_layers_is_refused(widths):
    with pytest.raises(ValueError, match="two or more whole numbers of 1 or more"):
        FullyConnected(widths)


def test_samples_may_have_any_shape():
    net = FullyConnected((6, 4, 2))
    samples = torch.randn(5, 2, 3)
    assert net(samples).shape == (5, 2)
    assert torch.equal(net(samples), net(samples.flatten(1)))
