"""Models: loading, packed attention, chat templates, tool calls."""

MOST_LOGITS = 1 << 26
"""Logits of one chunk of the language-model head in training: 256 MiB in float32."""
