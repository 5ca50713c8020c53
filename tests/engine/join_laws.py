"""What join() promises, as bodies that every rank runs: `law(comm)`.

The threads communicator runs them in test_join.py, mpirun runs this file.
"""

import sys

import torch
from torch import nn
from toy import backward, batch, make_model, sgd, wrap

import ddl
from ddl.collectives import messages

COUNTS = (3, 0, 5, 1)  # batches of each rank
KINDS = (
    {"compressor": "gtopk", "bucket_bytes": 200},
    {"compressor": "gtopk", "collective": "exact", "wire": "compact"},
    {"compressor": "topk"},
    {"compressor": "none"},
    {"compressor": "gaussiank"},
    {"compressor": "randomk", "dense_below": 9},
)


def state_of(model, optimizer):
    """Digests of parameters, of the optimizer's state, and of what this rank owes."""
    momenta = [(str(i), s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())]
    owed = [(str(i), a.residual) for i, (_, a) in enumerate(optimizer.reducer.owing)]
    owed = [(name, residual) for name, residual in owed if residual is not None]
    return tuple(ddl.parameters_digest(pairs) for pairs in (model, momenta, owed))


def train_unevenly(comm, steps, **kwargs):
    model = make_model()
    optimizer = wrap(model, comm=comm, **kwargs)
    with optimizer.join() as block:
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
    return model, optimizer, block


def ranks_agree_after_uneven_numbers_of_batches(comm):
    for kind in KINDS:
        model, optimizer, block = train_unevenly(comm, COUNTS[comm.rank], **kind)
        parameters, momenta, _ = state_of(model, optimizer)
        told = messages.gather_objects(comm, (parameters, momenta, block.last))
        assert len(set(told)) == 1, kind
        assert COUNTS[block.last] == max(COUNTS[: comm.size])
        assert optimizer.reducer.taken == max(COUNTS[: comm.size])
        optimizer.close()


def a_rank_that_has_run_out_is_one_with_gradients_of_zero(comm):
    for kind in KINDS:
        model, optimizer, _ = train_unevenly(comm, COUNTS[comm.rank], **kind)
        fed = make_model()
        other = wrap(fed, comm=comm, **kind)
        for step in range(max(COUNTS[: comm.size])):
            other.zero_grad()
            if step < COUNTS[comm.rank]:
                backward(fed, comm.rank, step)
            else:
                (sum(p.sum() for p in fed.parameters()) * 0.0).backward()
            other.step()
        assert state_of(model, optimizer) == state_of(fed, other), kind
        optimizer.close()
        other.close()


def a_scaler_changes_nothing_and_is_the_same_on_all_ranks_afterwards(comm):
    """Of a scale that grows within the block, and goes down once."""
    steps = 2 + 2 * COUNTS[comm.rank]
    for kind in ({"compressor": "gtopk"}, {"compressor": "none"}):
        results = []
        for scaled in (True, False):
            scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3, enabled=scaled)
            model = make_model()
            optimizer = wrap(model, comm=comm, scaler=scaler, **kind)
            with optimizer.join():
                for step in range(steps):
                    optimizer.zero_grad()
                    inputs, labels = batch(comm.rank, step)
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    if step == 7:  # where one rank is left, of three or four
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
            results.append(state_of(model, optimizer))
            told = messages.gather_objects(comm, (results[-1][:2], scaler.state_dict()))
            assert all(other == told[0] for other in told)
            optimizer.close()
        assert results[0] == results[1]


def what_was_owed_is_paid_or_still_owed(comm):
    """Whole numbers and steps of P, so that sums are exact."""
    for kind in KINDS:
        if "compact" in kind.values():
            continue  # an average of whole numbers may be rounded in its wire
        weight = nn.Parameter(torch.zeros(300))
        optimizer = torch.optim.SGD([weight], lr=float(comm.size))
        optimizer = ddl.DistributedOptimizer(optimizer, comm=comm, density=0.05, **kind)
        generator = torch.Generator().manual_seed(comm.rank)
        given = torch.zeros(300)
        with optimizer.join():
            for _ in range(COUNTS[comm.rank]):
                gradient = torch.randint(-50, 50, (300,), generator=generator).float()
                given += gradient
                optimizer.zero_grad()
                (weight * gradient).sum().backward()
                optimizer.step()
        owed = [a.residual for _, a in optimizer.reducer.owing]
        owed = sum(residual for residual in owed if residual is not None)
        left = sum(messages.gather_objects(comm, given - owed))
        torch.testing.assert_close(left, -weight.detach(), rtol=0, atol=1e-3)
        optimizer.close()


def a_short_last_window_counts(comm):
    """Batches of an accumulation window that is not full, with step() and without."""
    model = make_model()
    optimizer = wrap(model, comm=comm, backward_passes_per_step=2)
    with optimizer.join():
        for batch in range(COUNTS[comm.rank]):
            backward(model, comm.rank, batch)
            if batch % 2 or (batch == COUNTS[comm.rank] - 1 and comm.rank != 2):
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.between_steps == (comm.rank != 2)
    told = messages.gather_objects(comm, state_of(model, optimizer)[:2])
    assert len(set(told)) == 1
    optimizer.zero_grad()
    optimizer.close()


def averages_changed_by_those_who_go_on_reach_all(comm):
    """Clipping and a scheduler, both called where there are batches only."""
    model = make_model()
    optimizer = wrap(model, sgd(model), comm=comm)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with optimizer.join() as block:
        for step in range(COUNTS[comm.rank]):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
    state = messages.broadcast_object(comm, scheduler.state_dict(), block.last)
    scheduler.load_state_dict(state)
    rate = optimizer.param_groups[0]["lr"]
    told = messages.gather_objects(comm, (rate, *state_of(model, optimizer)[:2]))
    assert len(set(told)) == 1
    assert rate == 0.2 * 0.5 ** max(COUNTS[: comm.size]) == scheduler.get_last_lr()[0]
    optimizer.close()


def two_optimizers_share_a_block(comm):
    """A GAN: the generator's loss sends gradients through the discriminator, to be discarded."""
    torch.manual_seed(0)
    G, D = nn.Linear(2, 3), nn.Linear(3, 1)
    oG, oD = (
        ddl.DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), comm=comm, density=0.5
        )
        for m in (G, D)
    )
    with oG.join(oD):
        for step in range(COUNTS[comm.rank]):
            torch.manual_seed(100 * comm.rank + step)
            z, real = torch.randn(8, 2), torch.randn(8, 3)
            oD.zero_grad()
            (D(G(z).detach()).square() - D(real).square()).mean().backward()
            oD.step()
            oG.zero_grad()
            D(G(z)).square().mean().backward()
            oG.step()
    told = messages.gather_objects(comm, (state_of(G, oG)[:2], state_of(D, oD)[:2]))
    assert len(set(told)) == 1
    for optimizer in (oG, oD):
        optimizer.zero_grad()
        optimizer.close()


LAWS = [
    ranks_agree_after_uneven_numbers_of_batches,
    a_rank_that_has_run_out_is_one_with_gradients_of_zero,
    what_was_owed_is_paid_or_still_owed,
    a_short_last_window_counts,
    averages_changed_by_those_who_go_on_reach_all,
    two_optimizers_share_a_block,
    a_scaler_changes_nothing_and_is_the_same_on_all_ranks_afterwards,
]


def main() -> None:
    torch.set_num_threads(1)
    comm = ddl.init(timeout=60)
    for law in LAWS:
        law(comm)
    if comm.rank == 0:
        print(f"{len(LAWS)} laws of join() hold on {comm.size} ranks")


if __name__ == "__main__":
    sys.exit(main())
