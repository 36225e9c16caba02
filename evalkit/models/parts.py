"""The parts of a loaded transformers model that evalkit runs by themselves."""

from __future__ import annotations

from typing import Any


def base_of(model: Any) -> Any:
    """Return the part of a causal language model that gives hidden states: all but its output head.

    It is what transformers calls the base model, but where a class names none (Llama 4's text model is its own base
    model) the submodule that holds the input embedding.
    """
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embedding for module in child.modules()))
