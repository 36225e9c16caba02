"""Binary blocks: read back by the documented layout."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from evalkit.pages.documents import encoded

DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def decoded(block: str) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Read a block by its description."""
    data = gzip.decompress(base64.b64decode(block))
    size = int.from_bytes(data[:4], "little")
    assert (4 + size) % 8 == 0
    header = json.loads(data[4 : 4 + size])
    body = data[4 + size :]
    found = {}
    for name, (kind, offset, count) in header.pop("arrays").items():
        assert offset % 8 == 0
        found[name] = np.frombuffer(body, f"<{kind}", count, offset)
    return header, found


@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=4).filter(lambda one: "arrays" not in one),
    arrays_of.arrays(np.float32, arrays_of.array_shapes(max_dims=2, max_side=7)),
    st.lists(st.integers(0, 255), max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
)
def test_contents_are_read_back(header: dict[str, str], floats: np.ndarray, small: list[int], large: list[int]) -> None:
    given = {"f": ("f4", floats), "u": ("u1", np.array(small, int)), "i": ("i4", np.array(large, int))}
    found, arrays = decoded(encoded(header, given))
    shown = {one: one.encode("utf-8", "replace").decode() for one in (*header, *header.values())}
    shown = {one: DIRECTION.sub(lambda part: f"\\u{ord(part[0]):04x}", text) for one, text in shown.items()}
    assert found == {shown[key]: shown[text] for key, text in header.items()}
    np.testing.assert_array_equal(arrays["f"], floats.ravel())
    assert arrays["u"].tolist() == small
    assert arrays["i"].tolist() == large


@pytest.mark.parametrize("value", [-1, 256])
def test_numbers_that_do_not_fit(value: int) -> None:
    with pytest.raises(OverflowError, match=f"array gold: values from {value} to {value} do not fit u1"):
        encoded({}, {"gold": ("u1", np.array([value]))})
