"""Models and texts that examples and benchmarks share; nothing in it knows of the engine."""
