"""Aggregators: replace a flat gradient by its average over ranks, in full or in part."""
