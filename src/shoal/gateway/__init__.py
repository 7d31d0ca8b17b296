"""Server of sessions for OpenAI and Anthropic clients: agents exchange text, and training gets the sampled tokens."""
