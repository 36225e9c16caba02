"""Analysis of a model's attention, layer by layer."""
