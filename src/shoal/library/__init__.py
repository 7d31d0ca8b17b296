"""What a user of the package calls: training in one call, and the parts of a training loop."""
