"""Programs that run inside the sandbox; they import the standard library, pytest and coverage only."""
