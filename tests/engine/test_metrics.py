"""What steps have cost: records of buckets, and the summary of a run so far."""

import json
from dataclasses import fields

import pytest
from toy import backward, make_model, sgd, wrap

import ddl
from ddl.aggregation.aggregator import Outcome
from ddl.comm import threads
from ddl.metrics import BucketMetrics, RunTotals, StepMetrics, Totals

SUMS = [field.name for field in fields(Totals) if field.name != "steps"]


def bucket(index=0, select=1.0, communicate=2.0, wait=0.5, picked=10, sent=80, finite=True):
    """Seconds as given, one thing straight after the other."""
    outcome = Outcome(finite, picked, select, select, select + communicate, sent)
    return BucketMetrics(
        index, f"layer{index}", 100, 400, outcome, waited=(3.0, 3.0 + wait), applied=(4.0, 4.25)
    )


def steps_with_metrics(comm, steps=4, **kwargs):
    model = make_model()
    optimizer = wrap(model, bucket_bytes=200, **kwargs)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
        seen.append(optimizer.metrics)
    return optimizer, seen


@pytest.mark.parametrize("compressor", ["gtopk", "none"])
def test_the_buckets_of_a_step_add_up_to_the_step(compressor):
    def work(comm):
        return steps_with_metrics(comm, compressor=compressor)[1]

    numel = sum(p.numel() for p in make_model().parameters())
    for seen in threads.run(2, work):
        for metrics in seen:
            assert [b.index for b in metrics.buckets] == [0, 1, 2, 3]
            assert sum(b.numel for b in metrics.buckets) == numel
            assert sum(b.picked for b in metrics.buckets) == metrics.density_actual * numel
            for what in ("bytes_sent", "select_seconds", "communicate_seconds", "wait_seconds"):
                parts = sum(getattr(b, what) for b in metrics.buckets)
                assert parts == pytest.approx(getattr(metrics, what)), what
            assert all(b.bytes_sent > 0 and b.wait_seconds >= 0 for b in metrics.buckets)


def test_the_summary_is_the_sum_of_all_steps():
    def work(comm):
        optimizer, seen = steps_with_metrics(comm)
        return ddl.metrics.summary(optimizer), seen

    for summary, seen in threads.run(3, work):
        assert summary.all.steps == len(seen) == 4
        for what in ("bytes_sent", "select_seconds", "communicate_seconds", "wait_seconds"):
            total = sum(getattr(metrics, what) for metrics in seen)
            assert getattr(summary.all, what) == pytest.approx(total), what
        for what in SUMS:
            parts = sum(getattr(totals, what) for _, totals in summary.buckets)
            assert getattr(summary.all, what) == pytest.approx(parts), what
        assert summary.all.ratio == pytest.approx(
            sum(m.bytes_sent for m in seen) / sum(m.bytes_dense for m in seen)
        )


def test_a_summary_does_not_change_with_later_steps_and_can_be_had_after_the_last():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        found = []
        for step in range(2):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
            found.append(ddl.metrics.summary(optimizer))
        optimizer.close()
        return [each.all.steps for each in [*found, ddl.metrics.summary(optimizer)]]

    assert threads.run(2, work) == [[1, 2, 2]] * 2


def test_the_slowest_bucket_comes_first_and_seconds_are_means_over_steps():
    totals = RunTotals()
    for _ in range(2):
        totals.add([bucket(0), bucket(1, communicate=5.0)])
    summary = ddl.metrics.summary(Holder(totals))
    assert [name for name, _ in summary.buckets] == ["layer1", "layer0"]
    plain = json.loads(json.dumps(summary.as_dict()))
    assert plain["select_seconds"] == 2.0 and plain["communicate_seconds"] == 7.0
    assert plain["wait_seconds"] == 1.0 and plain["apply_seconds"] == 0.5
    assert plain["exposed_fraction"] == pytest.approx(1 / 9)
    assert plain["ratio"] == 0.2 and plain["density_actual"] == 0.1 and plain["steps"] == 2
    assert plain["buckets"][0]["communicate_seconds"] == 5.0


def test_the_printed_summary_answers_in_milliseconds():
    totals = RunTotals()
    for step in range(4):
        totals.add(
            [bucket(index, select=0.001, wait=0.0005) for index in range(7)], finite=step > 0
        )
    text = str(ddl.metrics.summary(Holder(totals)))
    assert text.startswith("4 steps, 1 skipped, 0 discarded")
    assert "select          7.00 ms" in text and "wait            3.50 ms" in text
    assert text.count("layer") == 5 and "and 2 more" in text
    assert all(len(line) < 100 for line in text.splitlines())


def test_a_bucket_that_joins_later_is_counted_for_the_steps_it_had():
    totals = RunTotals()
    totals.add([bucket(0)])
    totals.add([bucket(0), bucket(1, select=4.0)])
    means = {
        each["name"]: each for each in ddl.metrics.summary(Holder(totals)).as_dict()["buckets"]
    }
    assert (means["layer0"]["steps"], means["layer0"]["select_seconds"]) == (2, 1.0)
    assert (means["layer1"]["steps"], means["layer1"]["select_seconds"]) == (1, 4.0)


def test_before_the_first_step_everything_is_zero():
    optimizer, _ = threads.run(1, lambda comm: steps_with_metrics(comm, steps=0))[0]
    summary = ddl.metrics.summary(optimizer)
    assert summary.all == Totals() and summary.buckets == ()
    assert "0 steps" in str(summary) and json.dumps(summary.as_dict())
    assert optimizer.metrics.bytes_sent == 0 and optimizer.metrics.step == -1


def test_a_skipped_step_is_counted_as_one():
    def work(comm):
        optimizer, _ = steps_with_metrics(comm, steps=1)
        optimizer.zero_grad()
        parameters = optimizer.param_groups[0]["params"]
        sum(float("nan") * parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        return ddl.metrics.summary(optimizer), optimizer.metrics

    for summary, metrics in threads.run(2, work):
        assert (summary.all.steps, summary.skipped) == (2, 1)
        assert not metrics.finite


def test_two_optimizers_of_one_process_count_apart():
    def work(comm):
        one, _ = steps_with_metrics(comm, steps=1)
        other, _ = steps_with_metrics(comm, steps=3)
        return [ddl.metrics.summary(each).all.steps for each in (one, other)]

    assert threads.run(2, work) == [[1, 3]] * 2


def test_what_does_not_aggregate_has_no_summary():
    with pytest.raises(
        ValueError, match=r"DistributedOptimizer or a ddl\.SparseHookState, got SGD"
    ):
        ddl.metrics.summary(sgd(make_model()))


def test_numbers_by_bucket_are_lists_in_launch_order():
    step = StepMetrics.of(0, [bucket(0), bucket(1, wait=0.25, picked=7)], 2.0, 0.0)
    assert step.by_bucket() == {
        "bucket/numel": [100, 100],
        "bucket/picked": [10, 7],
        "bucket/bytes_sent": [80, 80],
        "bucket/select": [1.0, 1.0],
        "bucket/communicate": [2.0, 2.0],
        "bucket/wait": [0.5, 0.25],
    }


class Holder:
    def __init__(self, totals):
        self.totals = totals
