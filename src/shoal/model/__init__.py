"""Models: loading, packed attention, chat templates, tool calls."""

UNKNOWN = 255
"""Byte of an expert that was not recorded; the trainer chooses it."""
MOST_LOGITS = 1 << 26
"""Logits of one chunk of the language-model head in training: 256 MiB in float32."""
MOST_LOGITS_OF_GPU = 1 << 29
"""Logits of one chunk on a GPU, 1 GiB in bfloat16: few large products take less time there than many small ones."""
