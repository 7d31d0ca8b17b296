"""Hostile programs attack the sandbox: tests run them on every backend, `shoal bench rewards` on the backend in use."""
