"""Uses of torch's private API; works with torch 2.13.0."""

from __future__ import annotations

from typing import Any

from evalkit.compatibility import names

_PACKAGE = "torch"
_COMPILED = "_orig_mod"


def compiled(module: Any) -> Any | None:
    """Return the original module of one that `torch.compile` returned; None for any other module.

    torch documents no way to get it from the compiled module.
    """
    return dict(module.named_children()).get(_COMPILED)


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks around its forward pass, which a copy of its class would not have.

    Public methods register and remove hooks, but none lists them.
    """
    return bool(
        names.attribute(_PACKAGE, module, "_forward_hooks") or names.attribute(_PACKAGE, module, "_forward_pre_hooks")
    )
