# mpirun -np 2 python examples/adoption/loop.py
"""A training loop as everybody has one. plain_loop.py is the same, without ddl."""

import torch
from digits import check, load, make_classifier, mean_loss
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import ddl

torch.manual_seed(0)
data = load()[ddl.init().rank :: ddl.size()]
model = make_classifier()
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), density=0.1)

first = mean_loss(model, data)
for _ in range(5):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
check(model, "loss", first, mean_loss(model, data))
