"""Published Versions of the weights on disk."""
