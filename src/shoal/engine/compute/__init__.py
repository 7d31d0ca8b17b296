"""The local engine: one model, computed step by step."""
