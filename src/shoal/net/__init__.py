"""Servers, clients and child processes, with Shoal's one set of limits, deadlines and retries."""
