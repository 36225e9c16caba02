"""What a model's attention does, layer by layer."""
