"""The observe room shows a run's numbers: metrics, progress, status, reports."""
