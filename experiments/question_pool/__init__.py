"""What choosing questions by expected information saves, over asking each once per epoch."""
