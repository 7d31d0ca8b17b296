"""Inference servers of other projects as engines."""
