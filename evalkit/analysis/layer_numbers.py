"""Numbers of layers, as users give them: from 0, or from -1 for the last layer with attention backwards."""

from __future__ import annotations

from collections.abc import Sequence

from evalkit.errors import UsageError


def parsed_layers(given: Sequence[str]) -> tuple[int, ...]:
    """Parse the values of `--layers`; repeated ones are left out.

    Raises:
        UsageError: one is not a number.
    """
    try:
        return tuple(dict.fromkeys(int(one) for one in given))
    except ValueError:
        raise UsageError(
            f"--layers {','.join(given)}: expected numbers of layers, from 0, or from -1 for the last one backwards"
        ) from None


def layer_of(number: int, layers: Sequence[int]) -> int | None:
    """Return the layer that a number means; None if there is none.

    Args:
        number: see the module.
        layers: the model's layers with attention, ascending.
    """
    if number >= 0:
        return number if number in layers else None
    return layers[number] if -number <= len(layers) else None


def chosen_layers(given: Sequence[int], layers: Sequence[int]) -> list[int]:
    """Return the layers that numbers mean, ascending; all for no numbers.

    Args:
        given: the numbers.
        layers: the model's layers with attention, ascending.

    Raises:
        UsageError: the model has no such layer.
    """
    found = {one: layer_of(one, layers) for one in given}
    if unknown := [one for one, layer in found.items() if layer is None]:
        raise UsageError(
            f"--layers: the model has no attention layer {unknown[0]}; its layers are {layers[0]} to {layers[-1]}, or "
            f"-1 to {-len(layers)}"
        )
    return sorted({layer for layer in found.values() if layer is not None}) or list(layers)


def described_layers(measured: Sequence[int], layers: Sequence[int]) -> str:
    """Return "all layers", "the last 4 layers" or "layers 0, 5".

    Args:
        measured: some of the layers.
        layers: the model's layers with attention, both ascending.
    """
    if list(measured) == list(layers):
        return "all layers"
    if len(measured) > 1 and list(measured) == list(layers[-len(measured) :]):
        return f"the last {len(measured)} layers"
    return f"layer{'s' * (len(measured) > 1)} {', '.join(map(str, measured))}"
