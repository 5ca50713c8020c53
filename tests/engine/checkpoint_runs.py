"""A run that can be saved and resumed, and what it owes."""

import torch
from laws import SPARSE_COMPRESSORS
from torch import nn
from toy import backward, sgd

import ddl
from ddl.comm import threads

STEPS, SAVED_AT, STEPS_PER_EPOCH = 60, 37, 20
KINDS = [("none", None, None, None), *SPARSE_COMPRESSORS, ("gtopk", "auto", "plain", None)]
OPTIMIZERS = {
    "sgd": lambda model: sgd(model, weight_decay=1e-3),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


class Run:
    """Training whose every part has a state: batch norm, momentum, a schedule, a warm-up."""

    def __init__(self, comm, kind=KINDS[0], optimizer="sgd", **kwargs):
        name, collective, wire, winners_per_pick = kind
        self.rank, density = comm.rank, 0.1
        generator = torch.Generator().manual_seed(comm.rank)
        self.model = nn.Sequential(
            nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 8), nn.Linear(8, 3)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.optimizer = ddl.DistributedOptimizer(
            OPTIMIZERS[optimizer](self.model),
            self.model.named_parameters(),
            compressor=name,
            collective=collective,
            wire=wire,
            global_density=winners_per_pick and density * winners_per_pick,
            density=density,
            density_warmup=ddl.DensityWarmup((0.5, 0.2)),
            **{"bucket_bytes": 450, "dense_below": 4, **kwargs},
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=9, gamma=0.8)

    @property
    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def go(self, first, last):
        for step in range(first, last):
            if step % STEPS_PER_EPOCH == 0:
                self.optimizer.set_epoch(step // STEPS_PER_EPOCH)
            self.optimizer.zero_grad()
            backward(self.model, self.rank, step)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, directory, step, **kwargs):
        return ddl.save_checkpoint(directory, **self.objects, step=step, **kwargs)

    def load(self, path):
        self.restored = ddl.load_checkpoint(path, **self.objects)
        return self

    def bits(self):
        """All that makes a run go on as it does, as one string of bytes."""
        states = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            states += [value for value in state.values() if value is not None]
        kept = [(a.residual, a.velocity) for _, a in self.optimizer.reducer.owing]
        states += [tensor for pair in kept for tensor in pair if tensor is not None]
        numbers = [self.optimizer.density, self.scheduler.get_last_lr(), self.optimizer.epoch]
        return b"".join(t.numpy().tobytes() for t in states) + repr(numbers).encode()

    def close(self):
        self.optimizer.close()


def owed(run, kind="residual"):
    """float64, by the names of parameters: this rank's share of what is owed, or its velocity."""
    shares = {}
    for bucket, aggregator in run.optimizer.reducer.owing:
        whole = torch.zeros(bucket.flat.numel(), dtype=torch.float64)
        kept = getattr(aggregator, kind)
        if kept is not None:
            whole[aggregator.first :][: kept.numel()] = kept
        for place, member in enumerate(bucket.members):
            shares[member.name] = bucket.part(whole, place)
    return shares


def owed_by_all(runs):
    shares = [owed(run) for run in runs]
    return {name: sum(share[name] for share in shares) for name in shares[0]}


def written(P, directory, steps=SAVED_AT, **kwargs):
    """Train, save, and return the runs of all ranks."""

    def work(comm):
        run = Run(comm, **kwargs).go(0, steps)
        run.save(directory, steps)
        run.close()
        return run

    return threads.run(P, work)


def resumed(P, path, steps=SAVED_AT, **kwargs):
    """Load and train on."""

    def work(comm):
        run = Run(comm, **kwargs).load(path).go(SAVED_AT, steps)
        run.close()
        return run

    return threads.run(P, work)
