"""Aggregators: replace a flat gradient by its average over ranks, in full or in part.

They know of tensors and ranks, not of models, parameters or hooks. `aggregator.py` says what each
must do; `feedback.py` what becomes of gradients that are not applied at once.
"""
