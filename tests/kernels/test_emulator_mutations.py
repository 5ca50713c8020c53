"""The kernel tests notice each barrier, fence and check of a bound that a kernel would lack.

Every such place of every CUDA source is taken out, one at a time, by its text (emulator.mutants).
Then a small suite, which passes on the sources as they are, must fail: by a wrong result or because
the emulator finds a race, a deadlock or an access out of bounds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import kernel_cases
import pytest
import torch
from emulator import emulated, mutants, sanitized
from emulator.emulated import EmulatorError
from emulator.mutants import Mutant, MutatedDriver
from emulator_samples import needs_emulator
from kernel_cases import (
    COSTS,
    DTYPES,
    OPERATIONS,
    Operation,
    assert_same,
    draw,
    some_indices,
    using,
    with_nonfinite,
)
from torch import Tensor

from ddl import kernels
from ddl.kernels import CudaOperations
from ddl.kernels.launch import COUNT, PADDING, Workspace
from ddl.kernels.sources import source_directory

pytestmark = needs_emulator

TEXTS = mutants.read_sources(source_directory())
MUTANTS = mutants.enumerate_mutants(TEXTS)
SEEDS = (1, 2, 3)
TILE = 4096

# Changes that make no difference: file, text of the change, which of those in the file, and why.
EQUIVALENT: dict[tuple[str, str, int], str] = {
    ("select.cu", "for (Size first = range.first; first < range.last;", 0): (
        "one round more finds no tile"
    ),
}

Check = Callable[[CudaOperations], None]


def copy_of(value: Any) -> Any:
    """A copy that is as aligned as the original."""
    if not isinstance(value, Tensor):
        return value
    offset = value.data_ptr() % 16 // value.element_size()
    room = torch.empty(value.numel() + 2 * 16, dtype=value.dtype)
    start = offset - room.data_ptr() % 16 // value.element_size() + 16
    return room[start : start + value.numel()].copy_(value)


def call(operation: Operation, arguments: dict[str, Any]) -> dict[str, Any]:
    """Like `Operation.call`, which makes copies of another alignment."""
    copies = {name: copy_of(value) for name, value in arguments.items()}
    result = getattr(kernels, operation.name)(**copies)
    outcome = {f"{name} after": value for name, value in copies.items()}
    return outcome | (result._asdict() if isinstance(result, tuple) else {"result": result})


def compare(
    operation: Operation, arguments: dict[str, Any], small: bool = False, blocks: int | None = None
) -> Check:
    """The operation gives the reference's results, on so many blocks at most."""

    def check(operations: CudaOperations) -> None:
        with using("reference"):
            expected = call(operation, arguments)
        with pytest.MonkeyPatch.context() as patch:
            if blocks is not None:
                patch.setattr(operations._launcher, "most_blocks", blocks)
            patch.setattr(kernel_cases, "emulated", lambda seed: operations)
            with using("emulated", small_buffers=small):
                got = call(operation, arguments)
        assert_same(got, expected, without=COSTS)

    return check


def selections() -> Iterator[Check]:
    """Predictions of every kind, ragged and misaligned vectors, few and many non-finite entries."""
    topk, gaussiank, at, *_ = OPERATIONS
    for case in range(8):
        dtype = DTYPES[case % 3]
        n = 2 * TILE + 77 + case if case % 4 else 300 + case
        odd = (3, 0, 600, 0)[case % 4]
        flat = torch.empty(n + 8, dtype=dtype)[case % 5 :][:n]
        flat.copy_(with_nonfinite(draw(("normal", "laplace")[case % 2], n, case, dtype), 1, odd))
        residual = torch.empty(n + 8)[case % 3 :][:n]
        residual.copy_(with_nonfinite(draw("few_values", n, case), 2, odd // 2))
        for k in (90, n // 2):
            arguments = {"flat": flat, "residual": residual, "k": k, "scale": 0.7}
            threshold = (None, 1e-30, 1e30, 2.0)[case % 4]
            yield compare(topk, arguments | {"threshold": threshold})
            yield compare(topk, arguments | {"threshold": threshold}, small=True)
            yield compare(gaussiank, arguments)
            yield compare(gaussiank, arguments, small=True)
        indices = some_indices(n, 400 if case % 4 else 100, case)
        yield compare(at, {"flat": flat, "residual": residual, "indices": indices, "scale": 0.7})
    # More tiles than a block has threads.
    n = 257 * TILE
    arguments = {"flat": draw("normal", n, 1), "residual": torch.zeros(n), "k": 600}
    yield compare(topk, arguments | {"threshold": 3.3}, blocks=1)


def padded(indices: Tensor, values: Tensor, room: int) -> tuple[Tensor, Tensor]:
    padding = torch.full((room,), PADDING, dtype=torch.int32)
    return torch.cat([indices, padding]), torch.cat([values, torch.zeros(room)])


def merges() -> Iterator[Check]:
    """Vectors with and without padding, of which some meet."""
    merge = OPERATIONS[4]
    assert str(merge) == "merge"
    for case in range(6):
        count_a, count_b = ((400, 150), (0, 5), (7, 700), (256, 256))[case % 4]
        a = some_indices(900, count_a, 1 + case), draw("few_values", count_a, 2)
        b = some_indices(900, count_b, 3 + case), draw("normal", count_b, 4)
        names = ("a_indices", "a_values", "b_indices", "b_values")
        arguments = dict(zip(names, (*a, *b), strict=True)) | {"k": (None, 200, 1)[case % 3]}
        yield compare(merge, arguments)
        yield padded_merge(merge, arguments, 300, 100)


def padded_merge(merge: Operation, arguments: dict[str, Any], more_a: int, more_b: int) -> Check:
    """Padding changes nothing."""

    def check(operations: CudaOperations) -> None:
        with using("reference"):
            expected = merge.call(arguments)
        a = padded(arguments["a_indices"], arguments["a_values"], more_a)
        b = padded(arguments["b_indices"], arguments["b_values"], more_b)
        k = 2000 if arguments["k"] is None else arguments["k"]
        merged = operations.launch_merge(*a, *b, k, Workspace(torch.device("cpu")))
        count = int(merged.report[COUNT])
        assert torch.equal(merged.indices[:count], expected["indices"])
        assert torch.equal(merged.values[:count], expected["values"])
        assert (merged.indices[count:] == PADDING).all() and not merged.values[count:].any()
        for name, more in (("fate_a", more_a), ("fate_b", more_b)):
            padding = torch.full((more,), -1, dtype=torch.int32)
            assert torch.equal(getattr(merged, name), torch.cat([expected[name], padding]))

    return check


def scatters() -> Iterator[Check]:
    """With padding, and with one entry more or less than a block has threads."""

    def put(dtype: torch.dtype, count: int) -> Check:
        def check(operations: CudaOperations) -> None:
            indices, values = padded(some_indices(900, count, 1), draw("normal", count, 2), 10)
            dense = torch.ones(900, dtype=dtype)
            operations.scatter(dense, indices, values, 0.5)
            expected = torch.zeros(900).index_put((indices[:count].long(),), values[:count] * 0.5)
            assert torch.equal(dense, expected.to(dtype))

        return check

    def give_back(count: int) -> Check:
        def check(operations: CudaOperations) -> None:
            indices, values = padded(some_indices(900, count, 1), draw("normal", count, 2), 10)
            residual, mask = draw("normal", 900, 3), torch.rand(count + 10) < 0.5
            expected = residual.clone()
            expected[indices[:count][mask[:count]].long()] += values[:count][mask[:count]]
            operations.give_back(residual, indices, values, mask)
            assert torch.equal(residual, expected)

        return check

    for count in (255, 246, 600):
        for dtype in DTYPES:
            yield put(dtype, count)
        yield give_back(count)


def every_operation() -> Iterator[Check]:
    for operation in OPERATIONS:
        for dtype in operation.dtypes:
            for n in (5, 1023, TILE + 1):
                yield compare(operation, operation.arguments(n, n, dtype))


SUITE: dict[str, list[Check]] = {
    "scatter": list(scatters()),
    "merge": list(merges()),
    "selections": list(selections()),
    "every operation": list(every_operation()),
}
# What is tried first, so that most mutants do not live long.
FIRST = {"scatter.cu": "scatter", "merge.cu": "merge", "random.cu": "every operation"}


@pytest.fixture(scope="module")
def drivers() -> list[MutatedDriver]:
    texts = mutants.with_switches(TEXTS, MUTANTS)
    return [MutatedDriver(seed, overrides=texts) for seed in SEEDS]


def survives(drivers: list[MutatedDriver], number: int, first: str) -> bool:
    """Whether the suite passes with a mutant."""
    order = sorted(SUITE, key=lambda name: name != first)
    for driver in drivers:
        driver.chosen = number
        operations = CudaOperations(driver)
        for name in order:
            for check in SUITE[name]:
                try:
                    check(operations)
                except (AssertionError, EmulatorError):
                    return False
    return True


def test_the_suite_passes_on_the_sources_as_they_are(drivers: list[MutatedDriver]) -> None:
    for driver in drivers:
        driver.chosen = 0
        for checks in SUITE.values():
            for check in checks:
                check(CudaOperations(driver))


def test_every_kind_of_place_was_found() -> None:
    for kind, pattern in (("barrier", "__syncthreads();"), ("fence", "__threadfence();")):
        found = sum(mutant.kind == kind for mutant in MUTANTS)
        lines = [line.partition("//")[0] for text in TEXTS.values() for line in text.splitlines()]
        assert found == sum(line.count(pattern) for line in lines) > 0
    assert {mutant.kind for mutant in MUTANTS} == {"barrier", "fence", "bound", "loop"}
    assert {mutant.file for mutant in MUTANTS} == set(TEXTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_suite_notices(
    mutant: Mutant, drivers: list[MutatedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "STEPS", 1 << 24)
    reason = EQUIVALENT.get(key(mutant))
    first = FIRST.get(mutant.file, "selections")
    alive = survives(drivers if reason is None else drivers[:1], mutant.number, first)
    if reason is not None:
        assert alive, f"{mutant} makes a difference; it was thought to make none: {reason}"
    else:
        assert not alive, f"no test notices {mutant}"


def key(mutant: Mutant) -> tuple[str, str, int]:
    alike = [m for m in MUTANTS if (m.file, m.original) == (mutant.file, mutant.original)]
    return mutant.file, mutant.original, alike.index(mutant)


def test_changes_that_make_no_difference_are_still_there() -> None:
    assert set(EQUIVALENT) <= {key(mutant) for mutant in MUTANTS}


def test_every_operation_under_the_sanitizers() -> None:
    """Another pair of eyes on memory: AddressSanitizer and UndefinedBehaviorSanitizer."""
    result = sanitized.run([__file__], timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed under the sanitizers" in result.stdout


if __name__ == "__main__":
    for seed in SEEDS[:2]:
        operations = CudaOperations(emulated.EmulatedDriver(seed, sanitize=True))
        for checks in SUITE.values():
            for check in checks:
                check(operations)
    print("passed under the sanitizers")
