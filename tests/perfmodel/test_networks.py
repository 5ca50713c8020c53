"""Networks, devices and links as data; profiles made from them."""

import pytest
import torchvision

from ddl.perfmodel import hardware, networks, published
from ddl.perfmodel.iteration import (
    IterationProfile,
    LayerProfile,
    efficiency,
    perfect_overlap_gain,
    speedup,
    uniform,
)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50"])
def test_tensors_are_those_of_torchvision_in_its_order(name):
    model = getattr(torchvision.models, name)(weights=None)
    theirs = [parameter.numel() for parameter in model.parameters()]
    assert [tensor.numel for tensor in networks.find(name).tensors] == theirs


@pytest.mark.parametrize(
    ("name", "giga"), [("alexnet", 0.714), ("vgg16", 15.47), ("resnet50", 4.089)]
)
def test_multiply_adds_are_those_that_torchvision_prints(name, giga):
    assert networks.find(name).macs / 1e9 == pytest.approx(giga, rel=1e-3)


def test_sizes_are_those_of_the_published_runs():
    ours = {
        "VGG-16": networks.vgg16_cifar(),
        "ResNet-20": networks.resnet20(),
        "AlexNet": networks.alexnet(),
        "ResNet-50": networks.resnet50(),
        "LSTM-PTB": networks.lstm_ptb(),
    }
    for run in published.THROUGHPUT_1G:
        assert ours[run.network].numel == run.numel, run.network
    sizes = {run.network: run.numel for run in published.NAIVE_10G}
    assert sizes == {"ResNet-50": networks.resnet50().numel, "GoogLeNet": networks.GOOGLENET_NUMEL}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_profile_takes_the_time_it_is_given_a_third_of_it_forward(name):
    network = networks.find(name)
    profile = network.profile(0.6, batch=32)
    assert profile.numel == network.numel and profile.batch == 32
    assert profile.t_f == pytest.approx(0.2) and profile.t_b == pytest.approx(0.4)
    assert profile.alone() == pytest.approx(0.6)


def test_devices_and_links_are_found_by_name():
    resnet50 = networks.resnet50()
    assert hardware.compute_seconds("v100", resnet50, 367) == pytest.approx(1.0)
    assert hardware.find_link("10gbe").alpha == published.ETHERNET_10G_ALPHA
    assert hardware.find_link("1gbe-2019").beta == published.ETHERNET_1G_BETA
    for name, link in hardware.LINKS.items():
        assert link.alpha_range[0] <= link.alpha <= link.alpha_range[1], name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: networks.find("resnet5"), "'resnet5' is not one of alexnet"),
        (lambda: hardware.find_link("token-ring"), "'token-ring' is not one of 1gbe"),
        (
            lambda: hardware.compute_seconds("abacus", networks.resnet20(), 1),
            "'abacus' is not one of p102-100",
        ),
        (lambda: IterationProfile(()), "at least one layer, got none"),
        (lambda: LayerProfile("fc", -1), "layer 'fc': numel must be at least 0, got -1"),
        (lambda: LayerProfile("fc", 1, t_b=float("nan")), "t_b must be at least 0, got nan"),
        (lambda: uniform([1], 1.0, 1.0, batch=0), "batch must be at least 1, got 0"),
        (lambda: uniform([1], 1.0, 1.0, t_u=-1.0), "t_u must be at least 0 s, got -1.0"),
        (lambda: uniform([0], 1.0, 1.0), "at least one layer with elements"),
        (lambda: speedup(0, 1.0, 1.0), "P must be at least 1"),
        (lambda: perfect_overlap_gain(0.0, 0.0, 0.0), "not all 0"),
        (lambda: uniform([1], 0.0, 0.0).at_speed(1.0), r"cannot scale an iteration of 0\.0 s"),
    ],
)
def test_nonsense_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ratios():
    assert speedup(8, t_1=1.0, t_P=2.0) == 4
    assert efficiency(t_1=1.0, t_P=2.0) == 0.5
    assert perfect_overlap_gain(1.0, 2.0, 2.0) == pytest.approx(1 + 2 / 3)
    assert perfect_overlap_gain(1.0, 2.0, 0.0) == 1


def test_spreading_and_scaling_keep_the_total():
    profile = uniform([10, 30], t_f=1.0, t_b=2.0, batch=4, t_io=1.0)
    assert [layer.t_b for layer in profile.layers] == [0.5, 1.5]
    twice = profile.at_speed(8.0)
    assert twice.alone() == pytest.approx(8.0) and twice.t_io == pytest.approx(2.0)
    assert twice.numel == 40 and twice.batch == 4
