"""Proofs of the rehearsal."""
