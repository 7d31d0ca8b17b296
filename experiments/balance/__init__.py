"""Several tasks in one run: what automatic ratios make of them, and whether each of three kinds is learned."""
