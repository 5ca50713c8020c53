"""What DDP with sparse_hook keeps to, as bodies that every rank runs; started by torchrun.

Prints the name of each law that holds, once all ranks have come through it.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy import backward, make_model, sgd

import ddl

KINDS = [
    {"compressor": "gtopk"},
    {"compressor": "gtopk", "collective": "exact", "wire": "compact", "global_density": 0.2},
    {"compressor": "topk", "dense_below": 14},
    {"compressor": "gaussiank"},
    {"compressor": "randomk"},
]
SHAPES = {"a": (7, 5), "b": (13,), "c": (4, 3, 2, 2), "d": (60,), "e": (1,)}


class Numbers(nn.Module):
    """Its gradients are the numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.c.data = self.c.data.to(memory_format=torch.channels_last)

    def forward(self, numbers: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, n) * numbers[n]).sum() for n in numbers]).sum()


def numbers(step: int, rank: int | None = None, leave_out: str = "") -> dict[str, Tensor]:
    seed = 1000 * step + (dist.get_rank() if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randint(-50, 51, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }
    return {name: value for name, value in drawn.items() if name not in leave_out}


def hooked(model: nn.Module, layouts: list[int] | None = None, **kwargs) -> tuple:
    """DDP with the hook, and its state; `layouts` gets the number of buckets of each step."""
    options = {key: kwargs.pop(key) for key in list(kwargs) if key in DDP_OPTIONS}
    model = DistributedDataParallel(model, **options)
    state = ddl.SparseHookState(model, **{"density": 0.1, **kwargs})

    def hook(state, bucket):
        if layouts is not None and bucket.is_last():
            layouts.append(bucket.index() + 1)
        return ddl.sparse_hook(state, bucket)

    model.register_comm_hook(state, ddl.sparse_hook if layouts is None else hook)
    return model, state


DDP_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb")
TINY = {"bucket_cap_mb": 1e-4}  # 104 bytes


def over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float64 sums over ranks, by name; what is not there counts as zeros."""
    totals = {}
    for name, shape in SHAPES.items():
        total = tensors[name].double() if name in tensors else torch.zeros(shape).double()
        totals[name] = total.contiguous().clone()
        dist.all_reduce(totals[name])
    return totals


def check_conservation(state, model, before: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Sum of residuals and gradients = P * applied + sum of new residuals; whole numbers."""
    P = dist.get_world_size()
    residuals = over_ranks(state.residuals())
    gradients = over_ranks(given)
    for name, parameter in model.module.named_parameters():
        applied = 0.0 if parameter.grad is None else (parameter.grad.double() * P).round()
        accumulated = over_ranks(before)[name] + gradients[name]
        assert torch.equal(applied + residuals[name], accumulated), name
        if parameter.grad is not None:
            grads = [torch.empty_like(parameter.grad.contiguous()) for _ in range(P)]
            dist.all_gather(grads, parameter.grad.contiguous())
            assert all(torch.equal(grads[0], other) for other in grads), name


def every_gradient_is_applied_or_owed_when_buckets_are_made_anew():
    for kind in KINDS:
        for view in (False, True):
            layouts: list[int] = []
            model, state = hooked(Numbers(), layouts, gradient_as_bucket_view=view, **TINY, **kind)
            whole = kind.get("wire", "plain") == "plain"
            for step in range(10 if kind is KINDS[0] else 4):
                before = state.residuals()
                model.zero_grad(set_to_none=step % 2 == 0)
                model(numbers(step)).backward()
                if whole:  # rounding moves what is owed off the whole numbers
                    check_conservation(state, model, before, numbers(step))
            assert layouts[0] == 1 and layouts[-1] > 2, layouts
            assert state.step == len(layouts)
            state.close()


def the_hook_never_waits_after_the_first_bucket():
    model = DistributedDataParallel(Numbers(), **TINY)
    state = ddl.SparseHookState(model, density=0.1)
    seconds = []

    def hook(state, bucket):
        late = state.step == 1 and bucket.index() == 0 and dist.get_rank() == 0
        time.sleep(1.0 * late)
        begin = time.perf_counter()
        result = ddl.sparse_hook(state, bucket)
        seconds.append(time.perf_counter() - begin)
        return result

    model.register_comm_hook(state, hook)
    for step in range(2):
        begin = time.perf_counter()
        model(numbers(step)).backward()
    assert time.perf_counter() - begin > 0.9
    assert max(seconds[1:]) < 0.5, seconds
    state.close()


def none_is_what_ddp_does_itself():
    for view in (False, True):
        plain = DistributedDataParallel(make_model(), gradient_as_bucket_view=view)
        model, state = hooked(make_model(), compressor="none", gradient_as_bucket_view=view)
        for step in range(3):
            for each in (plain, model):
                each.zero_grad()
                backward(each, dist.get_rank(), step)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8)
        assert not state.residuals()
        state.close()


def density_one_is_the_dense_average():
    for kind in KINDS:
        if "wire" in kind:
            continue
        model, state = hooked(Numbers(), **{**kind, "density": 1.0})
        for step in range(2):
            model.zero_grad()
            model(numbers(step)).backward()
            for name, total in over_ranks(numbers(step)).items():
                average = (total / dist.get_world_size()).float()
                torch.testing.assert_close(getattr(model.module, name).grad, average)
        assert not any(owed.any() for owed in state.residuals().values())
        state.close()


def train(model, state, steps) -> str:
    optimizer = model.optimizer
    for step in steps:
        optimizer.zero_grad()
        backward(model, dist.get_rank(), step)
        optimizer.step()
    digest = ddl.parameters_digest(model.module)
    assert len(set(ddl.gather_object(digest))) == 1
    return digest


def parameters_agree_and_a_pickled_state_goes_on_to_the_bit():
    for kind in ({"compressor": "gtopk"}, {"compressor": "gaussiank", "dense_below": 9}):
        model, state = hooked(make_model(), **kind)
        model.optimizer = sgd(model)
        start = ddl.parameters_digest(model.module)
        assert train(model, state, range(5)) != start
        inner = copy.deepcopy(model.module)
        momentum = copy.deepcopy(model.optimizer.state_dict())
        restored = pickle.loads(pickle.dumps(state))
        other = DistributedDataParallel(inner)
        with pytest.raises(ddl.DDLError, match=r"state\.attach"):
            restored._meet()
        restored.attach(other)
        other.register_comm_hook(restored, ddl.sparse_hook)
        other.optimizer = sgd(other)
        other.optimizer.load_state_dict(momentum)
        assert train(other, restored, range(5, 9)) == train(model, state, range(5, 9))
        assert restored.step == state.step == 9
        mine, theirs = state.residuals(), restored.residuals()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        state.close()
        restored.close()


def a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one():
    directory = ddl.broadcast_object(tempfile.mkdtemp() if dist.get_rank() == 0 else None)
    model, state = hooked(make_model(), density=0.2, dense_below=9)
    model.optimizer = sgd(model)
    train(model, state, range(5))
    saved = {"model": model, "optimizer": model.optimizer, "hook": state}
    ddl.save_checkpoint(directory, **saved, step=5)
    other, empty = hooked(make_model(seed=1), density=0.5, dense_below=9)
    other.optimizer = sgd(other)
    train(other, empty, range(2))  # so that DDP has made its buckets anew
    loaded = {"model": other, "optimizer": other.optimizer, "hook": empty}
    ddl.load_checkpoint(directory, **loaded)
    assert empty.density == 0.2 and empty.step == 5
    assert train(other, empty, range(5, 9)) == train(model, state, range(5, 9))
    mine, theirs = state.residuals(), empty.residuals()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    state.close()
    empty.close()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)


def gradients_without_sync_add_up():
    for view in (False, True):
        model, state = hooked(Numbers(), gradient_as_bucket_view=view, **TINY)
        for step in range(0, 8, 2):
            before = state.residuals()
            model.zero_grad()
            with model.no_sync():
                model(numbers(step)).backward()
            model(numbers(step + 1)).backward()
            both = {name: numbers(step)[name] + numbers(step + 1)[name] for name in SHAPES}
            check_conservation(state, model, before, both)
        assert state.step == 4
        state.close()


def unused_parameters_lose_nothing():
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # several buckets from the start
    for kind in KINDS[::3]:
        layouts: list[int] = []
        model, state = hooked(Numbers(), layouts, find_unused_parameters=True, **TINY, **kind)
        for step, left_out in enumerate(["", "a", "d" if dist.get_rank() else "b", "de", "", "c"]):
            before = state.residuals()
            model.zero_grad()
            given = numbers(step, leave_out=left_out)
            model(given).backward()
            if left_out == "de":
                assert model.module.d.grad is None  # DDP drops what no rank has used
            check_conservation(state, model, before, given)
        assert min(layouts) > 2
        state.close()


def a_static_graph_loses_nothing():
    model, state = hooked(Numbers(), static_graph=True, **TINY)
    for step in range(4):
        before = state.residuals()
        model.zero_grad()
        model(numbers(step)).backward()
        check_conservation(state, model, before, numbers(step))
    state.close()


def one_bad_gradient_is_seen_on_every_rank_and_owed_nowhere():
    for kind, told in ((KINDS[0], True), (KINDS[2], True), (KINDS[2], False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, state = hooked(Numbers(), scaler=scaler if told else None, **TINY, **kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(4):
            before = over_ranks(state.residuals())
            optimizer.zero_grad()
            given = numbers(step)
            bad = step == 2
            if bad and dist.get_rank() == 1:
                given["c"][1, 2, 0, 1] = float("inf")
            scaler.scale(model(given)).backward()
            if bad:
                assert all(bool(p.grad.isnan().all()) for p in model.parameters())
                if dist.get_rank() == 1:
                    given["c"][1, 2, 0, 1] = 0
                gradients, after = over_ranks(given), over_ranks(state.residuals())
                for name in after:
                    owed = before[name] + (1 if told else 4) * gradients[name]
                    small = torch.Size(SHAPES[name]).numel() < kind.get("dense_below", 0)
                    assert torch.equal(after[name], owed * (not small)), name
            parameters = ddl.parameters_digest(model.module)
            scaler.step(optimizer)
            scaler.update()
            assert bad == (ddl.parameters_digest(model.module) == parameters)
            assert scaler.get_scale() == (2.0 if step >= 2 else 4.0)
        assert state.skipped_steps == 1
        assert all(bool(owed.isfinite().all()) for owed in state.residuals().values())
        state.close()


def ranks_with_fewer_batches_can_join():
    model, state = hooked(make_model(), **TINY)
    model.optimizer = sgd(model)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            model.optimizer.zero_grad()
            backward(model, dist.get_rank(), step)
            model.optimizer.step()
    assert len(set(ddl.gather_object(ddl.parameters_digest(model.module)))) == 1
    state.close()


def ranks_with_other_settings_are_told():
    model, state = hooked(Numbers(), density=0.1 + 0.1 * dist.get_rank())
    with pytest.raises(ddl.DisagreementError, match=r"density: rank 1 has 0\.2, expected 0\.1"):
        model(numbers(0)).backward()
    assert isinstance(state.failure, ddl.DisagreementError)


def what_fails_in_the_background_is_raised_by_backward():
    if dist.get_world_size() != 2:
        return
    model, state = hooked(Numbers(), **TINY)
    for step in range(2):
        model(numbers(step)).backward()
    state.density = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(RuntimeError, match=r"(?s)step 2, bucket 0 \(e.*density 0\..*out of step"):
        model(numbers(2)).backward()
    assert isinstance(state.failure, ddl.CommunicationError)
    assert "step 2, bucket 0" in str(state.failure)
    with pytest.raises(ddl.DDLError, match="under way or has failed"):
        pickle.dumps(state)
    with pytest.raises(ddl.CommunicationError, match="step 2, bucket 0"):
        model(numbers(3)).backward()


LAWS: list[Callable[[], None]] = [
    every_gradient_is_applied_or_owed_when_buckets_are_made_anew,
    the_hook_never_waits_after_the_first_bucket,
    none_is_what_ddp_does_itself,
    density_one_is_the_dense_average,
    parameters_agree_and_a_pickled_state_goes_on_to_the_bit,
    a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one,
    gradients_without_sync_add_up,
    a_static_graph_loses_nothing,
    one_bad_gradient_is_seen_on_every_rank_and_owed_nowhere,
    ranks_with_fewer_batches_can_join,
    unused_parameters_lose_nothing,
    ranks_with_other_settings_are_told,
    what_fails_in_the_background_is_raised_by_backward,
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddl.init(timeout=30)
    for law in LAWS:
        law()
        ddl.barrier()
        if dist.get_rank() == 0:
            print(law.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
