"""Statistics of paired scores: numpy arrays in, numbers out. scipy is imported where it is used."""
