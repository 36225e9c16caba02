"""Evaluation of models while they are trained: a callback for transformers' Trainer, exported as `TrainerCallback`."""
