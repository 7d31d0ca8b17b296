"""How much learning survives stale data: AReaL's table 2 at a small scale."""
