"""A small GPT with attention of its own: the code of a checkpoint that carries its code, and a plain torch module.

The attention is causal by itself: it does not go through transformers' attention functions and takes no mask.
`OwnCausal` is what transformers builds from a checkpoint that this file was copied to; `PlainGPT` is no class of
transformers, as in a training loop of one's own. `LogitsOf` makes any such module a model that lm-eval takes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class Block(nn.Module):
    """One layer: attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.inner_norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states, [batch, length, width], after the layer."""
        parts = self.attention(self.attention_norm(states)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.projection(mixed.transpose(1, 2).flatten(2))
        return states + self.inner(self.inner_norm(states))


class Body(nn.Module):
    """Embeddings and layers: ids, [batch, length] → final states, [batch, length, width]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, window: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(window, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the final states."""
        states = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            states = block(states)
        return self.norm(states)


class PlainGPT(nn.Module):
    """A model of nanoGPT's form: ids, [batch, length] → logits, [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, window: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=window)
        self.body = Body(vocabulary, width, layers, heads, window)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.lm_head(self.body(ids))


class OwnConfig(PretrainedConfig):
    """Sizes of the model."""

    model_type = "own_attention"

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 2048,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**others)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Arguments of `Body`."""
        width, layers, heads = self.hidden_size, self.num_hidden_layers, self.num_attention_heads
        return self.vocab_size, width, layers, heads, self.max_position_embeddings


class OwnBase(PreTrainedModel):
    """What transformers reads of its classes."""

    config_class = OwnConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class OwnModel(OwnBase):
    """The layers."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.body = Body(*config.sizes)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.body.tokens

    def forward(self, input_ids: torch.Tensor, **others: Any) -> BaseModelOutput:
        """Return the final states; masks are ignored."""
        return BaseModelOutput(last_hidden_state=self.body(input_ids))


class OwnCausal(OwnBase):
    """The layers and the output head."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.model.body.tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **others: Any) -> CausalLMOutput:
        """Return logits; masks are ignored."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class LogitsOf(PreTrainedModel):
    """Any module that returns logits, as lm-eval's Hugging Face model takes it."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig, module: nn.Module) -> None:
        super().__init__(config)
        self.module = module

    def forward(self, input_ids: torch.Tensor, **others: Any) -> CausalLMOutput:
        """Return the module's logits."""
        return CausalLMOutput(logits=self.module(input_ids))
