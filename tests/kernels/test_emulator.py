"""The emulator gives CUDA's answers, and finds what a kernel's threads and blocks do wrong.

Its kernels are in tests/emulator/samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulator import emulated
from emulator.emulated import EmulatorError
from emulator_samples import ALL, SEEDS, driver, ints, needs_emulator, unsigned

pytestmark = needs_emulator


# Lanes of a warp.


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_move_values_as_cuda_says(width: int) -> None:
    n = 64
    values, out = torch.arange(n, dtype=torch.int32) * 3, torch.zeros(4 * n, dtype=torch.int32)
    driver().launch("lanes.cu", "shuffles", 1, (values, out, np.int32(width)), threads=n)
    taken, up, down, swapped = (out[part * n : part * n + n].tolist() for part in range(4))
    for i in range(n):
        warp, lane = i - i % 32, i % 32
        section = lane - lane % width
        inside = lane - section
        assert taken[i] == 3 * (warp + section + 5 % width)
        assert up[i] == 3 * (i - 3 if inside >= 3 else i)
        assert down[i] == 3 * (i + 3 if inside + 3 < width else i)
        assert swapped[i] == 3 * (warp + (lane ^ 5))


def test_shuffles_move_eight_bytes() -> None:
    values = torch.rand(32, dtype=torch.float64)
    numbers = torch.arange(32, dtype=torch.int64) << 40
    out, out_numbers = torch.zeros_like(values), torch.zeros_like(numbers)
    arguments = (values, out, numbers, out_numbers)
    driver().launch("lanes.cu", "wide_shuffles", 1, arguments, threads=32)
    assert torch.equal(out, torch.cat([values[1:], values[31:]]))
    assert torch.equal(out_numbers, numbers.roll(16))


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_matches_and_reductions(seed: int) -> None:
    n = 64
    values = torch.randint(0, 80, (n,), generator=torch.Generator().manual_seed(seed)).int()
    values[32:] = values[32:] % 32
    out = torch.zeros(8 * n, dtype=torch.int32)
    driver(seed).launch("lanes.cu", "votes", 1, (values, out), threads=n)
    rows = [unsigned(out[part * n : part * n + n]) for part in range(8)]
    for warp in range(2):
        mine = values[warp * 32 : warp * 32 + 32].tolist()
        ballot = sum((value & 1) << lane for lane, value in enumerate(mine))
        same = len({value >> 5 for value in mine}) == 1
        for lane, value in enumerate(mine):
            got = [row[warp * 32 + lane] for row in rows]
            alike = sum((other % 5 == value % 5) << at for at, other in enumerate(mine))
            assert got == [
                ballot,
                int(any(v > 60 for v in mine)),
                1,
                alike,
                ALL if same else 0,
                sum(mine),
                (min(mine) - 40) & ALL,
                max((v - 40) & ALL for v in mine),
            ]


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_a_warp_go_their_own_ways(seed: int) -> None:
    values, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    driver(seed).launch("lanes.cu", "halves", 1, (values, out), threads=64)
    halves = values.reshape(4, 16).sum(1).tolist()
    expected = [halves[i // 16] + halves[i // 16 ^ 1] for i in range(64)]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        (1, r"31 of 32 threads wait at __shfl_sync \(lanes.cu:\d+\) for the lanes 0xffffffff"),
        (2, r"deadlock: 31 of 32 threads wait .* 0xffffffff, 1 of 32 .* the lanes 0xff7fffff"),
        (3, r"0xffffff7f does not name lane 7"),
        (4, r"31 of 32 threads wait at __shfl_sync .*, 1 of 32 threads wait at __syncthreads"),
        (5, r"0x0000ffff does not name lane \d+"),
        (6, r"reads lane 20, which is not in the mask 0x0000ffff"),
        (7, r"deadlock: .*wait at __shfl_sync .*wait at __ballot_sync"),
    ],
)
def test_a_mask_that_lies_is_found(lie: int, complaint: str) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    driver().launch("lanes.cu", "masks", 1, (out, np.int32(0)), threads=32)
    assert out.tolist() == [3] * 32
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=complaint):
            driver(seed).launch("lanes.cu", "masks", 1, (out, np.int32(lie)), threads=32)


# Threads of a block.


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_count_and_vote(seed: int) -> None:
    values, out = torch.arange(96, dtype=torch.int32), torch.zeros(3 * 96, dtype=torch.int32)
    driver(seed).launch("lanes.cu", "barriers_with_votes", 1, (values, out), threads=96)
    assert out.tolist() == [85] * 96 + [1] * 96 + [1] * 96
    driver(seed).launch("lanes.cu", "barriers_with_votes", 1, (values - 20, out), threads=96)
    assert out.tolist() == [65] * 96 + [0] * 96 + [0] * 96


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("checked", [True, False])
def test_sums_over_a_block(seed: int, checked: bool) -> None:
    values, out = torch.randint(0, 99, (256,)).int(), torch.zeros(256, dtype=torch.int32)
    options = {"weak_memory": checked, "races": checked}
    driver(seed, **options).launch("blocks.cu", "scan", 1, (values, out))
    assert torch.equal(out, values.cumsum(0).int())
    reversed_ = values.flip(0)
    driver(seed, **options).launch("blocks.cu", "reverse", 1, (values,))
    assert torch.equal(values, reversed_)
    arguments = (values,)
    driver(seed, **options).launch(
        "blocks.cu", "reverse_in_dynamic_memory", 1, arguments, shared_bytes=1024
    )
    assert torch.equal(values.flip(0), reversed_)


def wrong_results(run: Callable[[int], bool]) -> int:
    return sum(not run(seed) for seed in range(40))


def test_a_missing_barrier_shows_in_some_orders() -> None:
    def reverses(seed: int) -> bool:
        values = torch.arange(256, dtype=torch.int32)
        unchecked = driver(seed, weak_memory=False, races=False)
        unchecked.launch("blocks.cu", "reverse_without_barrier", 1, (values,))
        return torch.equal(values.flip(0), torch.arange(256, dtype=torch.int32))

    assert wrong_results(reverses) > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_is_a_race_in_every_order(seed: int) -> None:
    values = torch.arange(256, dtype=torch.int32)
    message = r"race: .* of shared variable room, .* with no barrier between at blocks.cu:\d+"
    with pytest.raises(EmulatorError, match=message):
        driver(seed).launch("blocks.cu", "reverse_without_barrier", 1, (values,))


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_share_memory_need_syncwarp(seed: int) -> None:
    values = torch.arange(256, dtype=torch.int32)
    driver(seed).launch("blocks.cu", "neighbours", 1, (values, np.int32(1)))
    assert values.tolist() == [i ^ 1 for i in range(256)]
    with pytest.raises(EmulatorError, match=r"race: .* with no barrier between"):
        driver(seed).launch("blocks.cu", "neighbours", 1, (values, np.int32(0)))


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_may_write_the_same_value(seed: int) -> None:
    flag = ints(7)
    driver(seed).launch("blocks.cu", "same_value", 1, (flag, torch.ones(256).int()))
    assert flag.item() == 1
    driver(seed).launch("blocks.cu", "same_value", 1, (flag, torch.zeros(256).int()))
    assert flag.item() == 0


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        (1, r"block \d: deadlock: 100 of 256 threads wait at __syncthreads \(blocks.cu:\d+\), 156"),
        (2, r"block \d, .* threads wait at different barriers"),
    ],
)
def test_a_barrier_that_some_do_not_reach_is_found(mode: int, complaint: str) -> None:
    values = torch.zeros(256, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=f"blocks.cu, kernel barrier_for_some, {complaint}"):
        driver().launch("blocks.cu", "barrier_for_some", 2, (values, np.int32(mode)))


def test_waiting_for_what_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "STEPS", 100_000)
    with pytest.raises(EmulatorError, match="does not end"):
        driver().launch("blocks.cu", "spin", 2, (ints(0),))


def test_shared_memory_starts_with_garbage_that_varies() -> None:
    seen = set()
    for seed in range(20):
        out = torch.zeros(128, dtype=torch.int32)
        driver(seed).launch("blocks.cu", "garbage", 2, (out,), threads=64)
        assert (out != 0).all()
        seen.add(out[0].item())
    assert len(seen) > 3


# Blocks of a grid.


def add_up(kernel: str, seed: int, blocks: int = 6, **options: Any) -> tuple[int, int]:
    """Return what the last block found, and what is right."""
    values = torch.randint(1, 50, (3000,), generator=torch.Generator().manual_seed(seed)).int()
    of_blocks, finished, total = torch.zeros(blocks).int(), ints(0), ints(0)
    arguments = (values, np.int32(3000), of_blocks, finished, total)
    driver(seed, **options).launch("blocks.cu", kernel, blocks, arguments)
    return int(total), int(values.sum())


@pytest.mark.parametrize("races", [True, False])
def test_the_last_block_sees_what_was_fenced(races: bool) -> None:
    for seed in range(40):
        got, expected = add_up("last_block", seed, races=races)
        assert got == expected


@pytest.mark.parametrize(
    ("kernel", "at_least"), [("last_block_without_fences", 20), ("last_block_without_fence", 1)]
)
def test_a_missing_fence_shows_in_some_orders(kernel: str, at_least: int) -> None:
    """A fence just behind the place where it is missing makes mistakes rare."""

    def adds(seed: int) -> bool:
        got, expected = add_up(kernel, seed, races=False)
        return got == expected

    assert wrong_results(adds) >= at_least


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_fence_is_a_race_in_every_order(seed: int) -> None:
    with pytest.raises(EmulatorError, match=r"race: reads .* \(of_blocks\).*no fence and atomic"):
        add_up("last_block_without_fence", seed)
    message = r"race: reads .* \(of_blocks\).*no fence of this block after the atomic"
    with pytest.raises(EmulatorError, match=message):
        add_up("last_block_without_second_fence", seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_may_wait_for_those_that_began_before(seed: int) -> None:
    sums = torch.zeros(9, dtype=torch.int32)
    arguments = (torch.zeros_like(sums), torch.zeros(1).int(), sums)
    driver(seed).launch("blocks.cu", "chain", 9, arguments, threads=32)
    assert sums.tolist() == list(range(1, 10))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_read_what_others_write_are_found(seed: int) -> None:
    values = torch.arange(1024, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=r"race: .* argument 1 .values."):
        driver(seed).launch("blocks.cu", "shift_in_place", 4, (values, np.int32(1024)))
