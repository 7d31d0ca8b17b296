"""Models in and out: loading, packed attention, chat templates, tool calls."""

MOST_LOGITS = 1 << 26
"""Of one chunk of the language-model head in training: 256 MiB in float32."""
