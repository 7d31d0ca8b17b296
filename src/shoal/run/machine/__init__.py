"""The machine under a run: its GPUs, cores and memory, and the parts that Shoal misses."""
