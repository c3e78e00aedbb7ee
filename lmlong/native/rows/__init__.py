"""What a training step does between products: norms, gates and the loss."""
