"""What evalkit uses of torch beyond its public API; works with torch 2.13.0."""

from __future__ import annotations

from typing import Any

from evalkit.compatibility import names

_PACKAGE = "torch"
_COMPILED = "_orig_mod"


def compiled(module: Any) -> Any | None:
    """Return the module inside of what `torch.compile` returned; None where it is something else.

    torch documents no way back from a compiled module.
    """
    return dict(module.named_children()).get(_COMPILED)


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks around its forward pass, which a copy of its class would lack.

    Hooks are registered and removed by public methods, but cannot be listed by one.
    """
    return bool(
        names.attribute(_PACKAGE, module, "_forward_hooks") or names.attribute(_PACKAGE, module, "_forward_pre_hooks")
    )
