"""Three models with three tokenizers, each good at one task, as teachers of one another."""
