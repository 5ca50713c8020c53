# mpirun -np 2 python examples/adoption/trainer.py
"""A trainer as libraries have one. plain_trainer.py is the same, without ddl.

It accumulates over micro-batches in mixed precision, clips gradients and follows a schedule.
"""

import torch
from digits import Samples, check, load, make_classifier, mean_loss
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import ddl

PASSES = 4


class Trainer:
    """Trains a classifier; a step takes the mean gradient of PASSES micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        data: Samples,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        epochs: int,
        micro_batch_size: int,
    ):
        self.model, self.optimizer, self.scaler, self.epochs = model, optimizer, scaler, epochs
        self.loader = DataLoader(data, micro_batch_size, shuffle=True, drop_last=True)
        steps = epochs * (len(self.loader) // PASSES)
        self.schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

    def train(self):
        """All epochs."""
        self.model.train()
        for _ in range(self.epochs):
            micro_batches = list(self.loader)
            for begin in range(0, len(micro_batches) - PASSES + 1, PASSES):
                self.step(micro_batches[begin : begin + PASSES])

    def step(self, micro_batches: list):
        """One update of the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        for images, labels in micro_batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(self.model(images), labels) / PASSES
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()


torch.manual_seed(0)
data = load()[ddl.init().rank :: ddl.size()]
model = make_classifier()
scaler = torch.amp.GradScaler("cpu")
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
adam = ddl.DistributedOptimizer(adam, density=0.1, backward_passes_per_step=PASSES, scaler=scaler)
trainer = Trainer(model, data, adam, scaler, epochs=10, micro_batch_size=16)

first = mean_loss(model, data)
trainer.train()
check(model, "loss", first, mean_loss(model, data))
