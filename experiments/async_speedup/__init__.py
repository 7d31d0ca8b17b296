"""How much sooner an asynchronous run reaches the same held-out accuracy: AReaL's table 1 and its throughput by eta."""
