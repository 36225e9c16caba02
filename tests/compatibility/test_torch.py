"""evalkit's uses of torch beyond its public API behave as documented."""

from __future__ import annotations

import pytest
import torch

from evalkit.compatibility.torch import compiled, hooks_of
from evalkit.errors import EvalkitError


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_is_inside_of_a_compiled_module() -> None:
    module = torch.nn.Linear(2, 2)
    assert compiled(torch.compile(module)) is module
    assert compiled(module) is None
    assert compiled(torch.nn.Sequential(module)) is None


def test_hooks() -> None:
    module = torch.nn.Linear(2, 2)
    assert not hooks_of(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert hooks_of(module)
        handle.remove()
        assert not hooks_of(module)
    with pytest.raises(EvalkitError, match=r"torch \S+ has no object._forward_pre_hooks, .* pip install torch=="):
        hooks_of(object())
