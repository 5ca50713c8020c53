# mpirun -np 4 python examples/train_lstm.py --compressor gtopk
"""Trains a language model, two LSTM layers, on P workers that exchange sparse gradients.

The recipe is the field's for PTB: SGD without momentum at a learning rate of 20, which is divided
by 4 after each epoch that has not improved the validation loss; gradients clipped to a norm of
0.25; truncated back-propagation through 35 words; 20 streams a worker. `--size large` is the
published model, 1500 wide with dropout 0.65, 66 million parameters with 10,000 words. The learning
rate does not grow with P: steps are clipped, and at the edge of what works already. `--recipe
lstm-ptb` has the settings of gTop-k S-SGD instead (recipes.py).

    mpirun -np 4 python examples/train_lstm.py --size large --text ptb.{train,valid,test}.txt

Without --text it learns the source code of Python's standard library, whose words are names,
numbers and signs; such perplexities do not compare to PTB's. Each worker trains on a contiguous
part of the training text, and carries its state from batch to batch. Perplexities on the two other
texts are over all their words, each judged by one worker, and the same on any number of workers.

With --checkpoint-dir the run is saved after each epoch and at its end, with --checkpoint-every
within epochs, too: the state that is carried and dropout's generator included. The same command
with --resume added goes on where the newest checkpoint stands, to the bit on as many workers. On
another number each goes on at the same place of its own, longer or shorter, part of the text,
without a state.

Files and last line are as train_resnet50.py's. Exit code: 0; 1 if the parameters of the ranks
differ at the end; 2 for arguments or text that cannot be used.
"""

import hashlib
import logging
import math
import sys
from argparse import Namespace
from time import perf_counter
from typing import Any

import torch
from arguments import BadInput
from checkpoints import Checkpoints, check_goes_on
from lstm_arguments import parse_arguments
from ranks import limit_threads, mean_over_ranks, on_all_ranks
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
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import ddl
from ddl.workloads.lstm import SIZES, LSTMLanguageModel, State
from ddl.workloads.streams import judged_columns, rank_streams, windows
from ddl.workloads.text import Corpus, read_corpus

logger = logging.getLogger("train_lstm")

# Held-out text is judged in as many columns on any P, so that its perplexity does not depend on P.
JUDGED_COLUMNS = 32
# What a run must be resumed with as it was begun.
LASTING = (
    *("tokenizer", "vocabulary", "train_tokens", "held_out_tokens", "size", "tied", "dropout"),
    *("batch_size", "bptt", "base_lr", "lr_decay", "clip", "momentum", "wd", "seed"),
)


def main() -> int:
    return run_script("train_lstm.py", lambda: Trainer(parse_arguments()))


class Trainer:
    """A model, its text and its optimizer, ready to run on this rank."""

    def __init__(self, args: Namespace) -> None:
        """Checks everything before it writes anything.

        Raises:
            BadInput: on every rank, if any rank cannot do what the arguments ask for.
        """
        self.args = args
        self.device = choose_device(args)
        limit_threads()
        corpus, self.streams = on_all_ranks(lambda: load_text(args))
        self.valid, self.test = corpus.valid, corpus.test
        self.words = len(corpus.words)
        self.steps_per_epoch = math.ceil((len(self.streams) - 1) / args.bptt)

        torch.manual_seed(args.seed)
        size = SIZES[args.size]
        dropout = size.dropout if args.dropout is None else args.dropout
        self.model = LSTMLanguageModel(self.words, size.hidden, dropout, tied=args.tied)
        self.model.to(self.device)
        torch.manual_seed(args.seed + ddl.rank())  # dropout differs by rank

        self.optimizer = on_all_ranks(self.make_optimizer)
        self.last_step = last_step(args, self.steps_per_epoch)
        self.checkpoints = on_all_ranks(
            lambda: Checkpoints(
                args, lasting(args, corpus), model=self.model, optimizer=self.optimizer
            )
        )
        self.step_seconds: list[float] = []
        self.step = self.epoch = 0
        self.position = 0  # words of the epoch that all ranks together have trained on
        self.state: State | None = None  # what this rank's words of the epoch have left
        self.best = math.inf  # validation loss after an epoch
        if args.resume:
            on_all_ranks(self.resume)
        self.log = on_all_ranks(lambda: open_log(args, f"lstm-{args.size}", self.step))
        self.diagnostics = on_all_ranks(lambda: watch(self.optimizer, args, self.log.folder))

    def make_optimizer(self) -> ddl.DistributedOptimizer:
        """SGD, wrapped."""
        args = self.args
        sgd = torch.optim.SGD(
            self.model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.wd
        )
        return wrap(sgd, self.model, args)

    @property
    def words_per_step(self) -> int:
        """That all ranks together train on; the last step of an epoch may have fewer."""
        return self.args.bptt * self.args.batch_size * ddl.size()

    def save(self, epoch: int) -> None:
        """Writes a checkpoint, if one is wanted; `epoch` is the one to go on in."""
        if self.checkpoints.wanted:
            state = None if self.state is None else [part.cpu() for part in self.state]
            states = ddl.gather_object(state)
            self.checkpoints.save(epoch, self.step, self.position, best=self.best, states=states)

    def resume(self) -> None:
        """Goes on where the newest checkpoint stands.

        Raises:
            BadInput: there is none, or it is one of another run, or the run has ended.
        """
        restored, values = self.checkpoints.resume()
        self.best, self.epoch = values["best"], restored.epoch
        steps = restored.position // self.words_per_step
        if steps >= self.steps_per_epoch:  # only with other ranks than before
            self.epoch, steps = self.epoch + 1, 0
        if restored.P == ddl.size() and values["states"][ddl.rank()] is not None:
            hidden, cell = values["states"][ddl.rank()]
            self.state = hidden.to(self.device), cell.to(self.device)
        self.position = steps * self.words_per_step
        self.step = self.epoch * self.steps_per_epoch + steps
        check_goes_on(restored, self.step, self.last_step)

    def run(self) -> bool:
        """Trains and validates; returns whether all ranks hold the same parameters."""
        for epoch in range(self.epoch, math.ceil(self.last_step / self.steps_per_epoch)):
            train_loss = self.train_epoch(epoch)
            loss = self.judge(self.valid)
            self.log.record(
                self.step, epoch, {"val/loss": loss, "val/perplexity": perplexity(loss)}
            )
            logger.info(
                "epoch %d/%d: train perplexity %.1f, val perplexity %.1f, lr %.3g, density %.2g",
                epoch + 1,
                self.args.epochs,
                perplexity(train_loss),
                perplexity(loss),
                self.optimizer.param_groups[0]["lr"],
                self.optimizer.metrics.density_actual,
            )
            if loss < self.best:
                self.best = loss
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] /= self.args.lr_decay
            if self.step == (epoch + 1) * self.steps_per_epoch:
                self.position, self.state = 0, None
                self.save(epoch + 1)
        self.optimizer.close()
        if self.diagnostics:
            self.diagnostics.close()
        return self.summarize(train_loss, loss)

    def train_epoch(self, epoch: int) -> float:
        """One pass over this rank's part of the text, or what is left of it: the mean loss."""
        self.model.train()
        self.optimizer.set_epoch(epoch)
        losses = []
        batches = list(windows(self.streams, self.args.bptt))
        batches = batches[self.position // self.words_per_step :]
        done = perf_counter()
        for inputs, targets in self.log.progress(batches, f"epoch {epoch + 1}"):
            begun = perf_counter()
            self.optimizer.zero_grad()
            logits, self.state = self.model(inputs.to(self.device), self.state)
            loss = cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())
            loss.backward()
            backward_done = perf_counter()
            self.optimizer.synchronize()
            clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.step += 1
            self.position += inputs.numel() * ddl.size()

            losses.append(loss.item())
            previous, done = done, perf_counter()
            self.step_seconds.append(done - previous)
            metrics = self.optimizer.metrics
            self.log.record(
                self.step,
                epoch,
                {
                    "train/loss": losses[-1],
                    "train/perplexity": perplexity(losses[-1]),
                    "throughput/tokens_per_sec": inputs.numel() * ddl.size() / (done - previous),
                    "time/data": begun - previous,
                    "time/forward_backward": backward_done - begun,
                    "time/step": done - previous,
                    **metrics.as_dict(),
                },
                metrics.by_bucket(),
            )
            # At the end of an epoch the run is saved after validation, which may lower the rate.
            within = self.step < (epoch + 1) * self.steps_per_epoch
            if within and self.checkpoints.due(self.step, self.last_step):
                self.save(epoch)
                done = perf_counter()
            if self.step == self.last_step:
                break
        return mean_over_ranks(sum(losses) / len(losses))

    @torch.no_grad()
    def judge(self, tokens: Tensor) -> float:
        """Mean loss over all words of a text but its first, in nats."""
        self.model.eval()
        inputs, targets = (
            part[:, ddl.rank() :: ddl.size()] for part in judged_columns(tokens, JUDGED_COLUMNS)
        )
        loss, state = 0.0, None
        windows_here = range(0, len(inputs), self.args.bptt)
        for begin in (
            windows_here if inputs.shape[1] else ()
        ):  # there may be more ranks than columns
            window = slice(begin, begin + self.args.bptt)
            logits, state = self.model(inputs[window].to(self.device), state)
            judged = targets[window].to(self.device).flatten()
            loss += cross_entropy(logits.flatten(0, 1), judged, reduction="sum").item()
        # As Python's floats: a mean of float32 would depend on P in the seventh digit.
        return math.fsum(ddl.gather_object(loss)) / (len(tokens) - 1)

    def summarize(self, train_loss: float, val_loss: float) -> bool:
        """Prints the line of results on rank 0 and writes it to summary.json."""
        args = self.args
        summary = {
            "model": f"lstm-{args.size}",
            "text": names_of_text(args),
            "vocabulary": self.words,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "epochs": args.epochs,
            "steps": self.step,
            "val_perplexity": perplexity(val_loss),
            "best_val_perplexity": perplexity(self.best),
            "test_perplexity": perplexity(self.judge(self.test)),
            "train_loss": train_loss,
            "tokens_per_second": per_second(self.words_per_step, self.step_seconds),
        }
        return report(summary, self.model, self.optimizer, self.log, args)


def load_text(args: Namespace) -> tuple[Corpus, Tensor]:
    """The text, and this rank's streams of its training part.

    Raises:
        BadInput: a file is missing, or there is too little text.
    """
    try:
        corpus = read_corpus(
            args.text,
            args.tokenizer,
            args.vocabulary,
            args.train_tokens or None,
            args.held_out_tokens or None,
        )
        return corpus, rank_streams(corpus.train, ddl.rank(), ddl.size(), args.batch_size)
    except ValueError as error:
        raise BadInput(str(error)) from error


def names_of_text(args: Namespace) -> list[str] | str:
    return [file.name for file in args.text] or "standard library"


def lasting(args: Namespace, corpus: Corpus) -> dict[str, Any]:
    """What a run must be resumed with as it was begun; of the text a digest, too."""
    digest = hashlib.blake2b(digest_size=6)
    for part in (corpus.train, corpus.valid, corpus.test):
        digest.update(part.numpy())
    return {
        **{name: getattr(args, name) for name in LASTING},
        "text": f"{names_of_text(args)} {digest.hexdigest()}",
    }


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinity where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


if __name__ == "__main__":
    sys.exit(main())
