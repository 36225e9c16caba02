"""Token ids that depend on the tokenizer and generation config: chat messages and end-of-text tokens.

In: a tokenizer, a text or a model. Out: token ids.
"""

from __future__ import annotations

from typing import Any

from evalkit.errors import CheckpointError, TemplateError, first_line
from evalkit.models.chat import apply_chat_template


def as_message(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text as one user message, with the generation prompt.

    Raises:
        TemplateError: the tokenizer has no chat template, or the template fails.
    """
    if not tokenizer.chat_template:
        raise TemplateError("the tokenizer has no chat template; leave out --chat")
    try:
        turns = [{"role": "user", "content": text}]
        found = apply_chat_template(tokenizer, turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    except TemplateError:
        raise
    except Exception as error:  # a Jinja template may raise anything
        raise TemplateError(f"the tokenizer's chat template fails: {first_line(error)}") from error
    return list(found["input_ids"])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: those of the generation config, else the tokenizer's EOS token.

    `generate` reads the generation config too, but continues to the maximum length if it has none.

    Raises:
        CheckpointError: the generation config's eos_token_id is neither an integer nor a list of integers.
    """
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"generation_config.json: eos_token_id is {found!r:.60}; expected a token id or a list of token ids"
        )
    return frozenset(ids)
