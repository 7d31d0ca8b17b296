"""Versions of the weights on disk."""
