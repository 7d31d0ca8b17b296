"""The embedded models are made from nothing on first use."""
