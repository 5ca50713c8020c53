"""Wire formats: what they cost, what arrives, and that what is lacking can be owed exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddl.sparse import Packet, SparseVector
from ddl.wires import COMPACT, COMPACT_FP16, PLAIN, WIRES, find_wire

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.builds(math.ldexp, st.floats(-1, 1, width=32), st.integers(-149, 127))


def vector_of(values, indices=None, numel=2**31 - 1):
    if indices is None:
        indices = range(len(values))
    return SparseVector(
        torch.tensor(list(indices), dtype=torch.int32),
        torch.tensor(list(values), dtype=torch.float32),
        numel,
    )


def over_the_wire(wire, vector, finite=True):
    received = wire.decode(wire.encode(Packet(vector, finite)), vector.numel, CPU)
    assert received.finite is finite
    assert received.vector.numel == vector.numel
    assert torch.equal(received.vector.indices, vector.indices)
    return received.vector.values


def uniform_vector(numel, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(numel, generator=generator) < density
    indices = mask.nonzero().flatten().to(torch.int32)
    return SparseVector(indices, torch.randn(indices.numel(), generator=generator), numel)


def test_every_wire_is_found_by_its_name():
    assert list(WIRES) == ["plain", "compact", "compact-fp16"]
    for name, wire in WIRES.items():
        assert find_wire(name) is wire
        assert wire.name == name
    with pytest.raises(ValueError, match=r"wire must be one of plain, compact, .*, got 'zip'"):
        find_wire("zip")


def test_the_plain_wire_keeps_every_bit_in_8_bytes_an_entry():
    vector = vector_of([-0.0, 1e-45, 3.4e38], [0, 2**24 + 1, 2**31 - 2])
    received = over_the_wire(PLAIN, vector, finite=False)
    assert torch.equal(received.view(torch.int32), vector.values.view(torch.int32))
    assert PLAIN.rounded(vector) is vector
    assert PLAIN.exact
    assert PLAIN.encode(Packet(vector, True)).numel() == 8 + 3 * 8


@pytest.mark.parametrize("wire", [COMPACT, COMPACT_FP16], ids=lambda wire: wire.name)
@pytest.mark.parametrize("numel", [300_000, 2_000_000])
def test_compact_wires_take_at_most_4_3_bytes_an_entry_at_density_0_001(wire, numel):
    vector = uniform_vector(numel, 0.001)
    message = wire.encode(Packet(vector, True))
    assert message.numel() <= 4.3 * vector.count
    assert message.numel() == 8 + 4 * vector.count


@pytest.mark.parametrize("wire", [COMPACT, COMPACT_FP16], ids=lambda wire: wire.name)
def test_a_gap_too_long_for_16_bits_costs_4_bytes_more(wire):
    indices = [0, 65534, 65534 + 65535, 2**24 + 1, 2**31 - 2]
    vector = vector_of([1.0, 2.0, 3.0, 4.0, 5.0], indices)
    assert over_the_wire(wire, vector).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert wire.encode(Packet(vector, True)).numel() == 8 + 5 * 4 + 3 * 4


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
@pytest.mark.parametrize("indices", [[], [0], [2**31 - 2], range(1000)])
def test_any_count_and_any_index_arrives(wire, indices):
    indices = list(indices)
    vector = vector_of([1.5] * len(indices), indices)
    for finite in (True, False):
        assert over_the_wire(wire, vector, finite).tolist() == [1.5] * len(indices)


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
@given(values=st.lists(floats | magnitudes, max_size=40), skipped=st.integers(0, 2**20))
@settings(max_examples=300)
def test_what_arrives_and_what_it_lacks_add_up_exactly(wire, values, skipped):
    """So that whoever rounds can owe the difference: it is a float32 itself."""
    vector = vector_of(values, [skipped * place for place in range(1, len(values) + 1)])
    rounded = wire.rounded(vector)
    lacking = vector.values - rounded.values
    assert torch.isfinite(rounded.values).all()
    assert torch.equal(lacking.double(), vector.values.double() - rounded.values.double())
    assert torch.equal(rounded.values + lacking, vector.values)


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
@given(values=st.lists(floats | magnitudes, max_size=40))
@settings(max_examples=300)
def test_what_is_rounded_travels_unchanged_whole_or_in_part(wire, values):
    """A part has another scale, which must not round it once more."""
    rounded = wire.rounded(vector_of(values))
    assert torch.equal(over_the_wire(wire, rounded), rounded.values)
    for part in (slice(None, None, 2), slice(1, None), slice(None, 1)):
        piece = SparseVector(rounded.indices[part], rounded.values[part], rounded.numel)
        assert torch.equal(wire.rounded(piece).values, piece.values)
        assert torch.equal(over_the_wire(wire, piece), piece.values)


def test_rounding_is_to_the_nearest_of_8_or_11_significant_bits():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-20
    vector = SparseVector(torch.arange(10_000, dtype=torch.int32), values, 10_000)
    assert torch.equal(COMPACT.rounded(vector).values, values.to(torch.bfloat16).float())
    error = (COMPACT_FP16.rounded(vector).values - values).abs()
    assert bool((error <= values.abs() * 2.0**-11 + values.abs().max() * 2.0**-39).all())


@pytest.mark.parametrize("wire", [COMPACT, COMPACT_FP16], ids=lambda wire: wire.name)
@pytest.mark.parametrize("values", [[LARGEST, -LARGEST], [LARGEST, 1e36], [70_000.0], [-1e-37]])
def test_what_16_bits_cannot_hold_does_not_become_infinite(wire, values):
    vector = vector_of(values)
    rounded = wire.rounded(vector).values
    assert torch.isfinite(rounded).all()
    assert bool(((rounded - vector.values).abs() <= vector.values.abs() * 2.0**-8).all())


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
def test_sums_that_overflowed_arrive_as_such_and_spare_the_others(wire):
    received = over_the_wire(wire, vector_of([math.inf, 1.0, -math.inf, math.nan, 0.5]))
    assert received[:3].tolist() == [math.inf, 1.0, -math.inf]
    assert math.isnan(received[3]) and received[4] == 0.5


def test_fp16_values_share_a_scale_and_what_is_too_small_beside_the_largest_is_lacking():
    vector = vector_of([1e30, 1e-3, 1e22])
    rounded = COMPACT_FP16.rounded(vector).values
    assert rounded[1] == 0.0
    assert abs(rounded[2] / 1e22 - 1) < 1e-2
    assert COMPACT_FP16.rounded(vector_of([1e-3])).values[0] == pytest.approx(1e-3, rel=2.0**-11)


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
def test_messages_of_another_length_are_refused(wire):
    vector = vector_of([1.0, 2.0, 3.0, 4.0], [5, 6, 70_000, 70_001])
    message = wire.encode(Packet(vector, True))
    for wrong in (message[:5], message[:-4], message[:-1], torch.cat([message, message[:4]])):
        with pytest.raises(ValueError, match="bytes, got"):
            wire.decode(wrong, 100_000, CPU)


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
def test_a_message_may_lie_anywhere_in_a_frame(wire):
    vector = vector_of([1.0, -2.0, 0.5], [3, 70_000, 70_001])
    message = wire.encode(Packet(vector, True))
    for offset in range(1, 5):
        frame = torch.cat([torch.zeros(offset, dtype=torch.uint8), message])
        received = wire.decode(frame[offset:], vector.numel, CPU)
        assert torch.equal(received.vector.indices, vector.indices)
        assert torch.equal(received.vector.values, vector.values)
