"""Scores answers in killable processes, never in the main process."""
