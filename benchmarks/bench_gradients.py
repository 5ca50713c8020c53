"""Gradients to measure with: distributions, and sequences that drift as in training."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Draw = Callable[[int, torch.Generator], Tensor]


def normal(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def laplace(numel: int, generator: torch.Generator) -> Tensor:
    u = torch.rand(numel, generator=generator).sub_(0.5)
    sign = u.sign()
    return u.abs_().clamp_(max=0.49999997).mul_(-2).log1p_().neg_().mul_(sign)


def student(numel: int, generator: torch.Generator) -> Tensor:
    """Student's t with 3 degrees of freedom: heavy tails."""
    chi = torch.zeros(numel)
    for _ in range(3):
        chi += torch.randn(numel, generator=generator).square_()
    return torch.randn(numel, generator=generator).div_(chi.div_(3).sqrt_())


def uniform(numel: int, generator: torch.Generator) -> Tensor:
    return torch.rand(numel, generator=generator).mul_(2).sub_(1)


def layers(numel: int, generator: torch.Generator) -> Tensor:
    """Neighbouring layers whose scales differ by up to 1e5."""
    x = torch.randn(numel, generator=generator)
    for part, scale in zip(x.chunk(5), (10.0, 0.01, 1.0, 1e-4, 0.3), strict=False):
        part *= scale
    return x


def dominating(numel: int, generator: torch.Generator) -> Tensor:
    """One layer, an eighth of all, a million times larger than the rest."""
    x = torch.randn(numel, generator=generator).mul_(1e-3)
    x[numel // 2 : numel // 2 + numel // 8] *= 1e6
    return x


def rising(numel: int, generator: torch.Generator) -> Tensor:
    """Every entry larger than all before: each part meets its largest last."""
    return torch.arange(1, numel + 1, dtype=torch.float32)


def sparse(numel: int, generator: torch.Generator) -> Tensor:
    """99.5 % zeros."""
    x = torch.randn(numel, generator=generator)
    return x.mul_(torch.rand(numel, generator=generator) < 0.005)


def zeros(numel: int, generator: torch.Generator) -> Tensor:
    return torch.zeros(numel)


def equal(numel: int, generator: torch.Generator) -> Tensor:
    return torch.full((numel,), 0.1)


def few_values(numel: int, generator: torch.Generator) -> Tensor:
    """Seven different values: ties everywhere."""
    return torch.randint(-3, 4, (numel,), generator=generator).float()


def denormals(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-1000, 1000, (numel,), generator=generator).float().mul_(2.0**-149)


def nonfinite(numel: int, generator: torch.Generator) -> Tensor:
    """A Gaussian in which one of 100,000 entries is NaN or infinite."""
    x = torch.randn(numel, generator=generator)
    places = torch.randint(0, numel, (-(-numel // 100_000),), generator=generator)
    x[places] = torch.tensor([float("nan"), float("inf")])[places % 2]
    return x


DISTRIBUTIONS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        normal,
        laplace,
        student,
        uniform,
        layers,
        dominating,
        rising,
        sparse,
        zeros,
        equal,
        few_values,
        denormals,
        nonfinite,
    )
}


def draw(distribution: str, numel: int, seed: int) -> Tensor:
    """Draw a float32 vector."""
    return DISTRIBUTIONS[distribution](numel, torch.Generator().manual_seed(seed))


class Sequence:
    """Gradients of successive steps: mini-batch noise on layers of different scale.

    With drift, as in training: each layer's scale walks by 5 % a step, all scales shrink to a
    third over the sequence, and single steps are up to some tens of percent larger than their
    neighbours.
    """

    LAYERS = 40
    SHRINK = 3.0
    WALK, JITTER = 0.05, 0.1  # standard deviations of a log scale, per step

    def __init__(self, distribution: str, numel: int, steps: int, drift: bool, seed: int) -> None:
        """Draw what the steps are made of: a long noise vector, and the layers."""
        self.numel, self.steps, self.drift = numel, steps, drift
        self._generator = torch.Generator().manual_seed(seed)
        self._noise = draw(distribution, numel, seed)
        self._steady = draw(distribution, numel, seed + 1)  # the part that all mini-batches share
        share = torch.rand(self.LAYERS, generator=self._generator) + 0.02
        self._ends = [int(end) for end in (share.cumsum(0) / share.sum() * numel).tolist()]
        self._ends[-1] = numel
        self._log_scale = 1.5 * torch.randn(self.LAYERS, generator=self._generator)

    def __iter__(self) -> Iterator[Tensor]:
        """Give one float32 vector a step; its memory is used again for the next."""
        flat = torch.empty(self.numel)
        for _ in range(self.steps):
            jitter = 0.0
            if self.drift:
                walk = self.WALK * torch.randn(self.LAYERS, generator=self._generator)
                self._log_scale += walk - torch.tensor(self.SHRINK).log() / self.steps
                jitter = self.JITTER * float(torch.randn(1, generator=self._generator))
            start = int(torch.randint(0, self.numel, (1,), generator=self._generator))
            flat[: self.numel - start] = self._noise[start:]  # other noise at every place
            flat[self.numel - start :] = self._noise[:start]
            flat.add_(self._steady, alpha=0.3)
            begin = 0
            for end, scale in zip(self._ends, (self._log_scale + jitter).exp(), strict=True):
                flat[begin:end] *= float(scale)
                begin = end
            yield flat
