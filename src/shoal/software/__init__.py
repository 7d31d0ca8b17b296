"""Software tasks: faults planted in packages that have tests, and instances of other projects' formats."""
