"""Joins all rooms into one run: `plan` checks, `training` builds and takes down, `loop` trains."""
