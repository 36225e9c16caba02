"""Figures of finished analyses of attention."""
