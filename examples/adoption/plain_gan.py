# python examples/adoption/plain_gan.py
"""A generative adversarial network, with two optimizers. gan.py is the same, with ddl."""

import torch
from digits import check, load, stack
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

NOISE = 16


def make_optimizer(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
    return optimizer


def loss_of(logits, real):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def distance(generator, data):
    """How far the mean of what is generated lies from the mean of what is real."""
    with torch.no_grad():
        noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
        return (generator(noise).mean(0) - stack(data)[0].mean(0)).norm().item()


torch.manual_seed(0)
data = load()
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
generator_optimizer = make_optimizer(generator)
critic_optimizer = make_optimizer(critic)

first = distance(generator, data)
for _ in range(10):
    for images, _ in loader:
        made = generator(torch.randn(len(images), NOISE))

        critic_optimizer.zero_grad()
        loss = loss_of(critic(images), real=True) + loss_of(critic(made.detach()), real=False)
        loss.backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        loss_of(critic(made), real=True).backward()
        generator_optimizer.step()
check(nn.ModuleList([generator, critic]), "distance", first, distance(generator, data))
