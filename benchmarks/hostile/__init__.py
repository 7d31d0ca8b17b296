"""What is tried against the sandbox: by the tests on every rung, by `shoal bench rewards` on the one in use."""
