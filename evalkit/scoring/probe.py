"""The start-up check's means: a synthetic tree whose states are known, a model in float32, and one of fewer layers.

A `Probe` is a prefix, then branches that branch again, repeated until the row is as long as the batches that will run,
and one branch as long as the longest sequence. Every repetition must give the states of its sequence alone: a model
that takes positions from the row, has a window over the row or ignores the mask fails. Few sequences run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evalkit.compatibility.names import replaced
from evalkit.models.called import CalledModel
from evalkit.models.module_state import changed_code, class_of, content_digest
from evalkit.models.parts import layers_of
from evalkit.scoring.tree import TRUNK, Ints, Tree, build_tree

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Make a model compute in float32 inside the context, whatever the dtype of its weights; widening is exact.

    At most one module's weights exist twice: its own, and those of its children without children, since some modules
    read these directly (`conv1d.weight` in Zamba 2, which rounds its input to their dtype). A module that reads the
    weights of others gets two dtypes and fails.
    """
    kept: dict[nn.Module, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    # As large as many other modules together
    ends = (model.get_input_embeddings(), model.get_output_embeddings())

    def halves(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        leaves = (child for child in module.children() if not any(child is end for end in ends))
        for part in (module, *(leaf for leaf in leaves if not any(True for _ in leaf.children()))):
            parameters = part.named_parameters(recurse=False, remove_duplicate=False)
            for name, value in (*parameters, *part.named_buffers(recurse=False, remove_duplicate=False)):
                if value.dtype in HALF:
                    yield part, name, value

    def widen(module: nn.Module, *_: Any) -> None:
        for part, name, value in list(halves(module)):
            kept.setdefault(module, []).append((part, name, value))
            wide = value.detach().float()
            # A parameter can be replaced by a parameter only
            setattr(part, name, nn.Parameter(wide, False) if isinstance(value, nn.Parameter) else wide)

    def restore(module: nn.Module, *_: Any) -> None:
        for owner, name, value in kept.pop(module, []):
            setattr(owner, name, value)

    hooks: list[Any] = []
    for module in model.modules():
        if any(True for _ in halves(module)):
            hooks.append(module.register_forward_pre_hook(widen, prepend=True))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(kept):
            restore(module)


_FIRST, _LAST = 4, 2
"""Layers of a model's beginning and end that are always kept."""
_LARGEST = 2**24
"""Numbers of a buffer that may be a mask, such as GPT-Neo's; a larger one holds weights."""


def repeated_layers(model: Any) -> list[nn.Module]:
    """Return the layers without which a model of transformers' own code is checked in long rows.

    How a layer's states depend on the length of a row follows from its code and attributes. So one layer of each kind
    is kept: of its modules' classes, attributes, buffers, shapes of parameters and hooks. Code may also ask for the
    layer's number, which is in all of them: so the first layers, one in the middle and the last ones are kept too.
    Others' code may pick any layer by its number, so it runs in all of them.
    """
    if isinstance(model, CalledModel) or changed_code(map(class_of, model.modules())):
        return []
    layers = layers_of(model)
    traits = [_traits_of(layer) for layer in layers]
    for name, value in list(traits[0].items()) if traits else ():
        is_number = type(value) is int and all(own.get(name) == value + i for i, own in enumerate(traits))
        if is_number:
            for own in traits:
                del own[name]
    kept = {*range(_FIRST), len(layers) // 2, *range(len(layers) - _LAST, len(layers))}
    kept |= {number for number, own in enumerate(traits) if traits.index(own) == number}
    return [layer for number, layer in enumerate(layers) if number not in kept]


def _traits_of(layer: nn.Module) -> dict[str, Any]:
    traits = {}
    for path, module in layer.named_modules():
        traits[path] = type(module)
        for name, value in vars(module).items():
            traits[f"{path}.{name}"] = _trait(value)
    return traits


def _trait(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, Mapping):
        return {key: _trait(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_trait(part) for part in value]
    if isinstance(value, Set):
        return frozenset(value)
    if isinstance(value, partial):
        return _trait([value.func, value.args, value.keywords])
    if isinstance(value, MethodType):
        return id(value.__func__)
    if isinstance(value, torch.Tensor):
        is_weight = isinstance(value, nn.Parameter) or value.is_meta or value.numel() > _LARGEST
        return (value.dtype, value.shape) if is_weight else content_digest(value)
    # A config is the same object in all layers; a function that is a layer's own makes a kind of its own
    return type(value) if isinstance(value, nn.Module) else id(value)


@contextmanager
def without_layers(model: Any, skipped: Sequence[nn.Module]) -> Iterator[None]:
    """Make layers return their input inside the context; they run if the first layer returns more than its states."""
    returns_states = False

    def watch(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal returns_states
        if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            returns_states = inputs[0].shape == output.shape

    def passing(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs, **options: inputs[0] if returns_states else forward(*inputs, **options)

    with ExitStack() as stack:
        for layer in skipped:
            stack.enter_context(replaced(layer, forward=passing))
        if skipped:
            stack.callback(layers_of(model)[0].register_forward_hook(watch).remove)
        yield


SHORTEST = 8
"""Minimum tokens of a sequence that consists of a prefix, a stem and a leaf."""
_PREFIX = 24
"""Tokens that all sequences share; two thirds of them are the trunk where there is one."""
_STEMS, _LEAVES = (6, 31), (1, 17)
"""Lengths of the branches' stems, and of the leaves that each has; together 73 tokens, a prime number, so that a branch
that is repeated begins at another place of any block of tokens."""


@dataclass(frozen=True)
class Probe:
    """A row of tokens, and the sequence that each of them belongs to."""

    sequences: tuple[Ints, ...]
    tree: Tree
    """[nodes] the whole row, without a trunk; it has no pairs, since hidden states are compared."""
    owner: NDArray[np.int64]
    """[nodes] index in `sequences` of the sequence that contains the node at its position."""
    trunk: int
    """Length of the prefix that may be run first, as the trunk."""

    def after(self, trunk: int) -> Tree:
        """Return the tree without its first tokens, which are the trunk."""
        tokens, positions, ends = (part[trunk:] for part in (self.tree.tokens, self.tree.positions, self.tree.ends))
        return replace(self.tree, tokens=tokens, positions=positions, ends=ends - trunk)


def mask_first(tree: Tree) -> Tree:
    """Return the tree with its first token masked for all others, as by a window that is one token too short."""
    ends = tree.ends.copy()
    ends[0] = 1
    return replace(tree, ends=ends)


def make_probe(vocabulary: int, row: int, longest: int, seed: int = 0) -> Probe:
    """Build a probe: `row` nodes, at least `longest`, the tokens of its longest sequence, at least `SHORTEST`."""
    dice = np.random.default_rng(seed)
    scale = min(1.0, longest / (_PREFIX + max(_STEMS) + max(_LEAVES)))

    def drawn(length: int, least: int = 1) -> Ints:
        return dice.integers(0, vocabulary, max(least, length), dtype=np.int32)

    prefix = drawn(int(scale * _PREFIX), least=3)
    sequences: list[Ints] = []
    for length in _STEMS:
        stem = np.concatenate((prefix, drawn(int(scale * length))))
        sequences += [np.concatenate((stem, drawn(int(scale * leaf)))) for leaf in _LEAVES]
    branches = _branches(sequences, 0, len(prefix))
    sequences.append(np.concatenate((prefix, drawn(longest - len(prefix)))))
    long = _branches(sequences[-1:], len(sequences) - 1, len(prefix))
    # The prefix, whose subtree is the row, then as many branches as fit
    first, size = np.arange(len(prefix), dtype=np.int32), len(prefix)
    rows = [np.stack((prefix, first, np.full_like(first, row), np.zeros_like(first)))]
    for part in chain((branches, long), repeat(branches)):
        rows.append(part + np.array([[0], [0], [size], [0]], np.int32))
        size += part.shape[1]
        if size >= row:
            break
    tokens, positions, ends, owner = np.concatenate(rows, axis=1)[:, :row]
    none = np.empty(0, np.int32)
    tree = Tree(tokens, positions, np.minimum(ends, row), none, none, ())
    return Probe(tuple(sequences), tree, owner.astype(np.int64), 2 * len(prefix) // 3)


def _branches(sequences: list[Ints], number: int, prefix: int) -> NDArray[np.int32]:
    """Return [4, nodes] token, position, end of the subtree and sequence, from `number` on, of nodes after a prefix."""
    # A tree leaves out the last token
    padded = [np.append(sequence, 0).astype(np.int32) for sequence in sequences]
    tree = build_tree(padded, [np.ones(len(sequence), np.bool_) for sequence in padded], prefix)
    owner = np.empty(len(tree.tokens), np.int32)
    for index, path in enumerate(tree.paths):
        nodes = tree.pair_nodes[path]
        owner[nodes[nodes != TRUNK]] = number + index
    return np.stack((tree.tokens, tree.positions, tree.ends, owner))
