"""Parts of a loaded transformers model that evalkit runs separately.

In: a causal language model. Out: its base model, its layers.
"""

from __future__ import annotations

from typing import Any


def base_of(model: Any) -> Any:
    """Return the base model of a causal language model, which computes hidden states: all but the output head.

    For a class that is its own base model (Llama 4's text model), return the submodule with the input embedding.
    """
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embedding for module in child.modules()))


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a causal language model, in order; none where they are not a list of modules."""
    from torch.nn import ModuleList

    layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in base_of(model).modules() if isinstance(module, ModuleList))
    return next((list(found) for found in lists if len(found) == layers), [])
