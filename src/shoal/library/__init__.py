"""Calls of the package for users: training in one call, and the parts of a training loop."""
