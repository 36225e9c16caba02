"""Named models: their shapes; checkpoints with random weights, converted, or exported with their code."""
