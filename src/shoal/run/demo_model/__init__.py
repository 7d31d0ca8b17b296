"""The embedded models, made from nothing on first use."""
