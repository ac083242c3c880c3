"""What arguments must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvarn_hf.checks import whole


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_whole_numbers_of_any_kind(value):
    number = whole("n", value, least=3, most=3)
    assert number == 3 and type(number) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, torch.tensor([3, 3]), torch.tensor(3.0), float("inf")])
def test_what_is_none(value):
    with pytest.raises(ValueError, match="n must be an integer, got"):
        whole("n", value)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [({"least": 4}, "n must be an integer >= 4, got 3"), ({"least": 0, "most": 2}, "n must be an integer from 0 to 2")],
)
def test_out_of_bounds(bounds, message):
    with pytest.raises(ValueError, match=message):
        whole("n", 3, **bounds)
