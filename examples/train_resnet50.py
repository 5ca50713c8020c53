# mpirun -np 4 python examples/train_resnet50.py --compressor gtopk
"""Trains ResNet-50, or another image classifier, on P workers that exchange sparse gradients.

All that ddl asks of a training script starts with `ddl.` below; the rest is plain PyTorch.
--batch-size and --base-lr are those of one worker. The learning rate rises linearly from base-lr to
P * base-lr in --warmup-epochs (Goyal et al. 2017, arXiv 1706.02677), then falls to 0 along half a
cosine. The density falls through --density-warmup, one value an epoch, to --density. --lr-scaling
and --lr-steps are other habits, and --recipe sets all of it as a paper has it (recipes.py).

Rank 0 writes <log-dir>/metrics.jsonl (one line per step, of its own batches and clock, and one per
validation, of all ranks), TensorBoard events, and summary.json, which is also the last line
printed. Figures per step in it are means over all steps, density warm-up included, and bytes are
those of one rank, on average. `costs` in it, also printed as a table, says where rank 0's time
went, and the names of the buckets, whose numbers metrics.jsonl has under bucket/*, in launch order.

With --checkpoint-dir the run is saved after each epoch and at its end. The same command with
--resume added goes on where the newest checkpoint stands, to the bit on as many workers; on another
number the epoch's remaining images and the learning rate are those of the new number.

Exit code: 0; 1 if the parameters of the ranks differ at the end; 2 for arguments or data that
cannot be used.
"""

import logging
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from arguments import BadInput, parse_arguments
from checkpoints import Checkpoints, check_goes_on
from data_order import Repeatable, ResumableSampler
from image_data import ImageData, count_classes, load_data
from image_models import IMAGE_SIZES, build_model, choose_image_size, training_loss
from ranks import average_buffers, limit_threads, mean_over_ranks, on_all_ranks
from script import (
    choose_device,
    last_step,
    open_log,
    per_second,
    report,
    run_script,
    watch,
    wrap,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import ddl

logger = logging.getLogger("train_resnet50")

# What a run must be resumed with as it was begun.
LASTING = ("dataset", "image_size", "batch_size", "base_lr", "lr_scaling", "momentum", "wd", "seed")


def main() -> int:
    return run_script("train_resnet50.py", lambda: Trainer(parse_arguments()))


class Trainer:
    """A model, its data and its optimizer, ready to run on this rank."""

    def __init__(self, args: Namespace) -> None:
        """Checks everything before it writes anything.

        Raises:
            BadInput: on every rank, if any rank cannot do what the arguments ask for.
        """
        self.args = args
        self.device = choose_device(args)
        limit_threads()
        torch.manual_seed(args.seed)
        self.model, image_size = on_all_ranks(lambda: choose_model(args))
        self.model.to(self.device)
        data = load_everywhere(args, image_size)
        self.train_loader, self.sampler, self.val_loader = make_loaders(args, data)
        self.steps_per_epoch = len(self.train_loader)
        torch.manual_seed(args.seed + ddl.rank())  # dropout and augmentation differ by rank

        self.optimizer = on_all_ranks(self.make_optimizer)
        self.schedule = LambdaLR(self.optimizer, self.learning_rate_factor)
        self.last_step = last_step(args, self.steps_per_epoch)
        self.checkpoints = on_all_ranks(
            lambda: Checkpoints(
                args,
                {name: getattr(args, name) for name in LASTING},
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.schedule,
            )
        )
        self.step_seconds: list[float] = []
        self.step = self.epoch = 0
        self.position = 0  # images of the epoch that all ranks together have seen
        if args.resume:
            on_all_ranks(self.resume)
        name = f"{args.model}-{args.dataset}"
        self.log = on_all_ranks(lambda: open_log(args, name, self.step))
        self.diagnostics = on_all_ranks(lambda: watch(self.optimizer, args, self.log.folder))

    def make_optimizer(self) -> ddl.DistributedOptimizer:
        """SGD at the peak learning rate, wrapped."""
        args = self.args
        sgd = torch.optim.SGD(
            self.model.parameters(),
            lr=self.peak_lr,
            momentum=args.momentum,
            weight_decay=args.wd,
        )
        return wrap(sgd, self.model, args)

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up."""
        return self.args.base_lr * (ddl.size() if self.args.lr_scaling == "linear" else 1)

    def learning_rate_factor(self, step: int) -> float:
        """Share of the peak learning rate in a step, counted from 0."""
        args, epoch, start = self.args, step / self.steps_per_epoch, 1 / ddl.size()
        if args.lr_steps:
            return warmup_then_steps(epoch, args.warmup_epochs, args.lr_steps, start)
        return warmup_then_cosine(epoch, args.warmup_epochs, args.epochs, start)

    def save(self, epoch: int) -> None:
        """Writes a checkpoint, if one is wanted; `epoch` is the one to go on in."""
        self.checkpoints.save(epoch, self.step, self.position)

    def resume(self) -> None:
        """Goes on where the newest checkpoint stands.

        Raises:
            BadInput: there is none, or it is one of another run, or the run has ended.
        """
        args, P = self.args, ddl.size()
        restored, _ = self.checkpoints.resume()
        self.epoch, seen = restored.epoch, restored.position // P
        steps_left = (len(self.sampler) - seen) // args.batch_size
        if steps_left == 0:  # only with other ranks than before
            self.epoch, seen, steps_left = self.epoch + 1, 0, self.steps_per_epoch
        self.sampler.start, self.position = seen, seen * P
        self.step = (self.epoch + 1) * self.steps_per_epoch - steps_left
        if restored.P != P:
            self.schedule.base_lrs = [self.peak_lr]
            self.schedule.last_epoch = self.step - 1
            self.schedule.step()
        check_goes_on(restored, self.step, self.last_step)

    def run(self) -> bool:
        """Trains and validates; returns whether all ranks hold the same parameters."""
        for epoch in range(self.epoch, math.ceil(self.last_step / self.steps_per_epoch)):
            train_loss = self.train_epoch(epoch)
            val_loss, val_accuracy = self.validate()
            self.log.record(self.step, epoch, {"val/loss": val_loss, "val/accuracy": val_accuracy})
            if self.step == (epoch + 1) * self.steps_per_epoch:
                self.position = 0
                self.save(epoch + 1)
            logger.info(
                "epoch %d/%d: train loss %.4f, val loss %.4f, val accuracy %.2f %%, density %.2g",
                epoch + 1,
                self.args.epochs,
                train_loss,
                val_loss,
                100 * val_accuracy,
                self.optimizer.metrics.density_actual,
            )
        self.optimizer.close()
        if self.diagnostics:
            self.diagnostics.close()
        return self.summarize(train_loss, val_accuracy)

    def train_epoch(self, epoch: int) -> float:
        """One pass over this rank's shard, or what is left of it: the mean loss of all ranks."""
        self.model.train()
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        losses = []
        done = perf_counter()
        for images, labels in self.log.progress(self.train_loader, f"epoch {epoch + 1}"):
            begun = perf_counter()
            images, labels = images.to(self.device), labels.to(self.device)
            self.optimizer.zero_grad()
            loss, logits = training_loss(self.model(images), labels)
            loss.backward()
            backward_done = perf_counter()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.position += len(labels) * ddl.size()

            losses.append(loss.item())
            previous, done = done, perf_counter()
            self.step_seconds.append(done - previous)
            metrics = self.optimizer.metrics
            self.log.record(
                self.step,
                epoch,
                {
                    "train/loss": losses[-1],
                    "train/accuracy": hits(logits, labels) / len(labels),
                    "throughput/samples_per_sec": len(labels) * ddl.size() / (done - previous),
                    "time/data": begun - previous,
                    "time/forward_backward": backward_done - begun,
                    "time/step": done - previous,
                    **metrics.as_dict(),
                },
                metrics.by_bucket(),
            )
            # At the end of an epoch the run is saved after the validation, which changes it.
            within = self.step < (epoch + 1) * self.steps_per_epoch
            if within and self.checkpoints.due(self.step, self.last_step):
                self.save(epoch)
                done = perf_counter()
            if self.step == self.last_step:
                break
        return mean_over_ranks(sum(losses) / len(losses))

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Loss and accuracy on the validation images, each seen by one rank."""
        average_buffers(self.model)
        self.model.eval()
        totals = torch.zeros(3)
        for images, labels in self.val_loader:
            images, labels = images.to(self.device), labels.to(self.device)
            logits = self.model(images)
            loss = cross_entropy(logits, labels, reduction="sum").item()
            totals += torch.tensor([loss, hits(logits, labels), len(labels)])
        loss, correct, count = ddl.allreduce_mean(totals).tolist()
        return loss / count, correct / count

    def summarize(self, train_loss: float, val_accuracy: float) -> bool:
        """Prints the line of results on rank 0 and writes it to summary.json."""
        args = self.args
        summary = {
            "model": args.model,
            "dataset": args.dataset,
            "epochs": args.epochs,
            "steps": self.step,
            "val_accuracy": val_accuracy,
            "train_loss": train_loss,
            "images_per_second": per_second(args.batch_size * ddl.size(), self.step_seconds),
        }
        return report(summary, self.model, self.optimizer, self.log, args)


def choose_model(args: Namespace) -> tuple[nn.Module, int]:
    """The model, and the size of image it is to see."""
    model = build_model(args.model, count_classes(args))
    if args.image_size:
        sizes: tuple[int, ...] = (args.image_size,)
    elif args.dataset == "imagefolder":
        sizes = (224, 299)
    else:
        sizes = IMAGE_SIZES
    return model, choose_image_size(model, args.batch_size, sizes)


def load_everywhere(args: Namespace, image_size: int) -> ImageData:
    """The data on every rank. Only one rank per machine downloads, before the others look."""
    if args.download:
        on_all_ranks(lambda: load_data(args, image_size) if ddl.local_rank() == 0 else None)
        args.download = False
    return on_all_ranks(lambda: load_data(args, image_size))


def make_loaders(
    args: Namespace, data: ImageData
) -> tuple[DataLoader, ResumableSampler, DataLoader]:
    """Training loader, what shuffles it, and validation loader, all of this rank's shard.

    Raises:
        BadInput: there are too few images for one step.
    """
    P, total = ddl.size(), len(data.train)
    if total < P * args.batch_size:
        raise BadInput(
            f"{args.dataset} has {total} training images, {P} ranks with --batch-size "
            f"{args.batch_size} need {P * args.batch_size} for a step; use fewer ranks or smaller "
            "batches"
        )
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,
        # A process forked from one that runs MPI and threads may hang.
        "multiprocessing_context": "forkserver" if args.workers else None,
        "pin_memory": choose_device(args).type == "cuda",
        # Otherwise each pass would draw from the generator of dropout.
        "generator": torch.Generator(),
    }
    # Every rank must take the same number of steps, so the images left over are dropped (others in
    # each epoch).
    sampler = ResumableSampler(
        data.train, num_replicas=P, rank=ddl.rank(), seed=args.seed, drop_last=True
    )
    # DistributedSampler would pad its shards with images that then count twice.
    val = Subset(data.val, range(ddl.rank(), len(data.val), P))
    return (
        DataLoader(Repeatable(data.train, args.seed), sampler=sampler, drop_last=True, **options),
        sampler,
        DataLoader(val, **options),
    )


def warmup_then_cosine(epoch: float, warmup: float, epochs: int, start: float) -> float:
    """Factor of the peak rate: `start` to 1 in `warmup` epochs, then 1 to 0 until `epochs`."""
    if epoch < warmup:
        return start + (1 - start) * epoch / warmup
    progress = (epoch - warmup) / (epochs - warmup) if epochs > warmup else 1.0
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def warmup_then_steps(epoch: float, warmup: float, steps: Sequence[float], start: float) -> float:
    """Factor of the peak rate: `start` to 1 in `warmup` epochs, then a tenth from each step on."""
    if epoch < warmup:
        return start + (1 - start) * epoch / warmup
    return 0.1 ** sum(epoch >= step for step in steps)


def hits(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(dim=1) == labels).sum())


if __name__ == "__main__":
    sys.exit(main())
