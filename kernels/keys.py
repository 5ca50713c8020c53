"""Keys: the bits of a float32 magnitude, which order as the magnitudes do."""

import ctypes
import struct

MASK = 0x7FFFFFFF  # a float32's bits without the sign
INFINITE = 0x7F800000  # key of infinity; every NaN lies above


def key_of(magnitude: float) -> int:
    """Return the key of a non-negative magnitude, rounded to float32."""
    return struct.unpack("=i", struct.pack("=f", ctypes.c_float(magnitude).value))[0]


def magnitude_of(key: int) -> float:
    """Return the magnitude that a key stands for."""
    return struct.unpack("=f", struct.pack("=i", key))[0]
