"""Learning: advantages, packing and losses (all pure), the optimizer, and the process that owns the weights."""
