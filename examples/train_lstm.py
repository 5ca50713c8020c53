# mpirun -np 4 python examples/train_lstm.py --compressor gtopk
"""Trains a language model, two LSTM layers, on P workers that exchange sparse gradients.

The recipe is the field's for PTB: SGD without momentum at a learning rate of 20, which is divided
by 4 after each epoch that has not improved the validation loss; gradients clipped to a norm of
0.25; truncated back-propagation through 35 words; 20 streams a worker. `--size large` is the
published model, 1500 wide with dropout 0.65, 66 million parameters with 10,000 words. The learning
rate does not grow with P: steps are clipped, and at the edge of what works already.

    mpirun -np 4 python examples/train_lstm.py --size large --text ptb.{train,valid,test}.txt

Without --text it learns the source code of Python's standard library, whose words are names,
numbers and signs; such perplexities do not compare to PTB's. Each worker trains on a contiguous
part of the training text, and carries its state from batch to batch. Perplexities on the two other
texts are over all their words, each judged by one worker, and the same on any number of workers.

Files and last line are as train_resnet50.py's. Exit code: 0; 1 if the parameters of the ranks
differ at the end; 2 for arguments or text that cannot be used.
"""

import logging
import math
import sys
from argparse import Namespace
from pathlib import Path
from time import perf_counter

import torch
from arguments import BadInput
from lstm_arguments import parse_arguments
from ranks import limit_threads, mean_over_ranks, on_all_ranks
from run_log import RunLog
from script import choose_device, engine_summary, run_script, watch, wrap
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import ddl
from ddl.workloads.lstm import SIZES, LSTMLanguageModel
from ddl.workloads.streams import judged_columns, rank_streams, windows
from ddl.workloads.text import Corpus, read_corpus

logger = logging.getLogger("train_lstm")

# Held-out text is judged in as many columns on any P, so that its perplexity does not depend on P.
JUDGED_COLUMNS = 32


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
        self.step_seconds: list[float] = []
        self.step = 0
        self.log = on_all_ranks(lambda: open_log(args))
        self.diagnostics = on_all_ranks(lambda: watch(self.optimizer, args, self.log.folder))

    def make_optimizer(self) -> ddl.DistributedOptimizer:
        """SGD, wrapped."""
        args = self.args
        sgd = torch.optim.SGD(
            self.model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.wd
        )
        return wrap(sgd, self.model, args)

    @property
    def last_step(self) -> int:
        """The step to end after, counted from 1."""
        last_step = self.args.epochs * self.steps_per_epoch
        return min(last_step, self.args.max_steps or last_step)

    def run(self) -> bool:
        """Trains and validates; returns whether all ranks hold the same parameters."""
        best = math.inf
        for epoch in range(math.ceil(self.last_step / self.steps_per_epoch)):
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
            if loss < best:
                best = loss
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] /= self.args.lr_decay
        self.optimizer.close()
        if self.diagnostics:
            self.diagnostics.close()
        return self.summarize(train_loss, loss, best)

    def train_epoch(self, epoch: int) -> float:
        """One pass over this rank's part of the text: the mean loss of all ranks."""
        self.model.train()
        self.optimizer.set_epoch(epoch)
        losses, state = [], None
        batches = list(windows(self.streams, self.args.bptt))
        done = perf_counter()
        for inputs, targets in self.log.progress(batches, f"epoch {epoch + 1}"):
            begun = perf_counter()
            self.optimizer.zero_grad()
            logits, state = self.model(inputs.to(self.device), state)
            loss = cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())
            loss.backward()
            backward_done = perf_counter()
            self.optimizer.synchronize()
            clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.step += 1

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

    def summarize(self, train_loss: float, val_loss: float, best_val_loss: float) -> bool:
        """Prints the line of results on rank 0 and writes it to summary.json."""
        args = self.args
        where = ddl.metrics.summary(self.optimizer)
        engine = engine_summary(self.model, self.optimizer, self.log, args)
        # The first step also compiles, allocates and starts threads.
        seconds = self.step_seconds[1:] or self.step_seconds
        tokens = args.bptt * args.batch_size * ddl.size()
        summary = {
            "model": f"lstm-{args.size}",
            "text": [file.name for file in args.text] or "standard library",
            "vocabulary": self.words,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "epochs": args.epochs,
            "steps": self.step,
            "val_perplexity": perplexity(val_loss),
            "best_val_perplexity": perplexity(best_val_loss),
            "test_perplexity": perplexity(self.judge(self.test)),
            "train_loss": train_loss,
            "tokens_per_second": tokens * len(seconds) / sum(seconds),
            **engine,
        }
        logger.info("%s", where)
        text = self.log.finish(summary)
        if ddl.rank() == 0:
            print(text, flush=True)
        return engine["parameters_agree"]


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


def open_log(args: Namespace) -> RunLog:
    default = Path("logs") / f"lstm-{args.size}-{args.compressor}-P{ddl.size()}"
    return RunLog((args.log_dir or default) if ddl.rank() == 0 else None)


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinity where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


if __name__ == "__main__":
    sys.exit(main())
