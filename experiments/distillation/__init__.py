"""On-policy distillation of the embedded model from a larger one."""
