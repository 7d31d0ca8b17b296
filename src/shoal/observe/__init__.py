"""Numbers of a run: metrics, progress, reports."""
