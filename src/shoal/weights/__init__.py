"""Weights on disk: published Versions and the trainer's checkpoints."""
