"""What ranks settle before the first step, seen from the optimizer: levels, links, a collective."""

import logging

import pytest
import torch
from launch import ROOT
from toy import backward, digests_equal, make_model, train, wrap

import ddl
from ddl.comm import threads
from ddl.errors import DisagreementError
from ddl.links import Line, Links
from ddl.reduction import agreement

# Between nodes 1 Gb/s; within, a hundred times as much.
TWO_KINDS = "50e-6,9e-9,5e-6,9e-11"


@pytest.fixture
def nodes_of_two(monkeypatch):
    """Threads that believe that each two of them share a node."""
    monkeypatch.setattr(
        agreement, "find_nodes", lambda comm: tuple(rank // 2 for rank in range(comm.size))
    )


@pytest.fixture
def says(caplog):
    """What the engine has logged about levels."""
    caplog.set_level(logging.INFO, logger="ddl")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "ddl.reduction.agreement"
    ]


@pytest.mark.parametrize("collective", ["butterfly", "exact", "auto"])
@pytest.mark.parametrize("P", [4, 5, 6])
def test_training_in_two_levels_keeps_all_ranks_alike(nodes_of_two, P, collective):
    models = threads.run(P, lambda comm: train(comm, hierarchical=True, collective=collective))
    assert digests_equal(models)


def test_density_one_trains_alike_in_one_level_and_in_two(nodes_of_two):
    flat, levels = (
        threads.run(4, lambda comm, way=way: train(comm, density=1.0, hierarchical=way))[0]
        for way in (False, True)
    )
    for a, b in zip(flat.parameters(), levels.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_two_levels_are_the_default_where_links_differ(nodes_of_two, monkeypatch, says):
    monkeypatch.setenv("DDL_LINKS", TWO_KINDS)
    assert digests_equal(threads.run(4, train))
    assert len(says()) == 1
    assert says()[0].startswith("aggregating in two levels, 2 shards: 4 ranks on 2 nodes; 50 us")


@pytest.mark.parametrize("links", ["50e-6,9e-9", "50e-6,9e-9,50e-6,4e-9"])
def test_one_level_is_the_default_where_links_are_alike(nodes_of_two, monkeypatch, says, links):
    monkeypatch.setenv("DDL_LINKS", links)
    threads.run(4, train)
    assert says()[0].startswith("aggregating in one level: 4 ranks on 2 nodes; 50 us a round")


def test_nothing_is_measured_where_nothing_depends_on_it(monkeypatch, says):
    monkeypatch.setattr(agreement, "measure_links", None)
    threads.run(2, train)  # one node
    threads.run(2, lambda comm: train(comm, compressor="none"))
    threads.run(2, lambda comm: train(comm, hierarchical=False))
    threads.run(1, lambda comm: train(comm, hierarchical=True))
    assert says() == ["aggregating in one level: 2 ranks on 1 nodes"]


def test_auto_measures_once_before_the_first_step_and_says_why_it_chose(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="ddl")
    measured = []

    def measure(comm, nodes, wire):
        measured.append(comm.rank)
        return Links(Line(1e-3, 1e-8))

    monkeypatch.setattr(agreement, "measure_links", measure)

    def work(comm):
        model = make_model()
        optimizer = wrap(model, collective="auto", density=0.1, bucket_bytes=200)
        assert comm.rank in measured
        for step in range(2):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return model

    assert digests_equal(threads.run(3, work))
    assert sorted(measured) == [0, 1, 2]
    reasons = [r.getMessage() for r in caplog.records if r.name == "ddl.collectives.auto"]
    assert reasons
    assert all(" ranks: predicted " in reason for reason in reasons)
    assert len(reasons) == len(set(reasons))


def test_a_metric_counts_both_levels(nodes_of_two):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, hierarchical=True, density=0.1)
        backward(model, comm.rank, 0)
        optimizer.step()
        return optimizer.metrics

    numel = sum(parameter.numel() for parameter in make_model().parameters())
    for metrics in threads.run(4, work):
        assert metrics.density_actual == pytest.approx(0.1, abs=0.02)
        assert metrics.bytes_sent > 4 * numel / 2  # half the bucket to the neighbour
        assert metrics.residual_norm > 0
        assert metrics.communicate_seconds > 0


def test_a_frozen_parameter_does_not_move_whoever_owes_for_it(nodes_of_two):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, hierarchical=True, density=0.05, unused_parameters="zero")
        frozen = list(model.parameters())[2]
        for step in range(6):
            if step == 3:
                frozen.requires_grad_(False)
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
            if step == 3:  # momentum goes on by itself
                optimizer.state[frozen]["momentum_buffer"].zero_()
                before = frozen.detach().clone()
        return bool(torch.equal(frozen, before))

    assert threads.run(4, work) == [True] * 4


def test_parameters_added_later_travel_in_two_levels_too(nodes_of_two):
    def work(comm):
        model = make_model()
        late = torch.nn.Parameter(torch.ones(50))
        optimizer = wrap(model, hierarchical=True)
        optimizer.add_param_group({"params": [late]})
        for step in range(3):
            optimizer.zero_grad()
            (backward(model, comm.rank, step), (late * (comm.rank + 1)).sum().backward())
            optimizer.step()
        optimizer.close()
        return late.detach()

    first, *others = threads.run(4, work)
    assert (first < 1).any()
    assert all(torch.equal(first, other) for other in others)


def test_ranks_that_want_different_levels_are_told_so():
    def work(comm):
        train(comm, hierarchical=comm.rank == 0)

    with pytest.raises(DisagreementError, match="hierarchical: rank 1 has False, expected True"):
        threads.run(2, work)


@pytest.mark.parametrize("wrong", ["yes", 2])
def test_anything_but_yes_no_and_default_is_refused(wrong):
    with pytest.raises(ValueError, match="hierarchical must be True, False or None"):
        threads.run(1, lambda comm: train(comm, hierarchical=wrong))


def test_links_that_make_no_sense_are_refused(monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "fast")
    with pytest.raises(ValueError, match="DDL_LINKS: links must be alpha,beta"):
        threads.run(1, train)


def test_unknown_nodes_end_in_one_line_only_if_two_levels_are_wanted(monkeypatch):
    monkeypatch.setattr(agreement, "find_nodes", lambda comm: None)
    threads.run(2, train)
    with pytest.raises(ValueError, match="which ranks share a node"):
        threads.run(2, lambda comm: train(comm, hierarchical=True))


@pytest.mark.mpi
def test_two_levels_and_auto_under_mpirun(mpirun, tmp_path):
    """Nodes are pretended; links are measured."""
    script = tmp_path / "levels.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'engine')!r})\n"
        "import ddl\n"
        "from ddl.reduction import agreement\n"
        "from toy import train\n"
        "torch.set_num_threads(1)\n"
        "comm = ddl.init(timeout=60)\n"
        "assert agreement.find_nodes(comm) == (0, 0, 0, 0)\n"
        "agreement.find_nodes = lambda comm: (0, 0, 1, 1)\n"
        "for ways in ({'hierarchical': True}, {'collective': 'auto'}):\n"
        "    model = train(comm, **ways)\n"
        "    assert len(set(ddl.gather_object(ddl.parameters_digest(model)))) == 1\n"
    )
    done = mpirun(4, [str(script)])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model, rank: torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)),
            r"lr of group 0: rank 1 has 0\.2, expected 0\.1",
        ),
        (
            lambda model, rank: (torch.optim.Adam if rank else torch.optim.SGD)(
                model.parameters(), lr=0.1
            ),
            "optimizer: rank 1 has Adam, expected SGD",
        ),
    ],
)
def test_ranks_with_different_optimizers_are_told_so(make, message):
    def work(comm):
        model = make_model()
        wrap(model, make(model, comm.rank))

    with pytest.raises(DisagreementError, match=message):
        threads.run(2, work)


def test_a_scaler_on_one_rank_only_and_different_scales_are_told():
    for scales in ((None, 8.0), (8.0, 16.0)):

        def work(comm, scales=scales):
            scale = scales[comm.rank]
            model = make_model()
            wrap(model, scaler=scale and torch.amp.GradScaler("cpu", scale))

        with pytest.raises(DisagreementError, match="loss scale of scaler: rank 1 has"):
            threads.run(2, work)


def drift_rate(optimizer, model):
    optimizer.param_groups[0]["lr"] *= 0.5


def drift_frozen(optimizer, model):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("drift", [drift_rate, drift_frozen])
@pytest.mark.parametrize("compressor", ["none", "gtopk"])
def test_ranks_that_drift_apart_are_told_in_the_next_steps(drift, compressor):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor=compressor)
        for step in range(5):
            if step == 2 and comm.rank == 1:
                drift(optimizer, model)
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()

    with pytest.raises(ddl.CommunicationError, match=r"step 3.*the same learning rates"):
        threads.run(2, work)
