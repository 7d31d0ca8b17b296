"""Models: loading, packed attention, chat templates, tool calls."""

UNKNOWN = 255
"""Each byte of an expert of a token that nobody recorded; the trainer's own choice is used."""
MOST_LOGITS = 1 << 26
"""Logits of one chunk of the language-model head in training: 256 MiB in float32."""
