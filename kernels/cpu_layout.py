"""Sizes and places that the orchestration in cpu.py shares with the loops, compiled either way.

csrc/cpu/loops.h has the same numbers in C++.
"""

BLOCK = 64  # entries handled together; one word of the map of non-finite entries
CHUNK = 1 << 16  # entries summed before they are added to others; pieces begin at its multiples
LANES = 16  # partial sums of a chunk, and as many of its squares

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # form of the gradient; both halves arrive as uint16
STATE_POSITION, STATE_COUNT, STATE_LEAST, STATE_PASSED, STATE_NONFINITE = range(5)
STATE_SIZE = 8
