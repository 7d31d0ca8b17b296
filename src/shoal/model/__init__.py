"""Models in and out: loading, packed attention, chat templates, tool calls."""
