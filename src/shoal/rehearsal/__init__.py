"""Rehearsal of a run on a virtual clock, with cost models of its engines, trainer and scorer."""
