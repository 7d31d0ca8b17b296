"""Servers, clients and child processes: each with the one set of limits, deadlines and retries that the house has."""
