"""A small model, its data, and its training by DistributedOptimizer."""

import torch
from torch import nn

import ddl


def make_model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rank, step, size=16):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def backward(model, rank, step):
    inputs, labels = batch(rank, step)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, **kwargs)


def wrap(model, optimizer=None, **kwargs):
    optimizer = sgd(model) if optimizer is None else optimizer
    kwargs.setdefault("density", 0.1)
    return ddl.DistributedOptimizer(optimizer, model.named_parameters(), **kwargs)


def train(comm, steps=5, **kwargs):
    model = make_model(seed=comm.rank)
    optimizer = wrap(model, **kwargs)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    optimizer.close()
    return model


def digests_equal(models):
    return len({ddl.parameters_digest(model) for model in models}) == 1


def train_seed(comm, seed):
    model = make_model(seed)
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    return model
