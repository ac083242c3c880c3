"""The trace of a tile's imbalance."""

import torch

from kvarn_hf.method.normalize import imbalance_trace, variance_normalize_published


class TestImbalanceTrace:
    TILE = torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)

    def test_is_that_of_the_published_states(self):
        trace = imbalance_trace(self.TILE, 6, relative=False)
        for rounds in range(1, 7):
            column, row = variance_normalize_published(self.TILE, rounds)
            even = self.TILE / column / row
            columns, rows = even.std(-2, correction=0), even.std(-1, correction=0)
            expected = sum(x.amax(-1) / x.amin(-1) for x in (columns, rows))
            torch.testing.assert_close(trace[..., : rounds + 1].amin(-1), expected, rtol=1e-4, atol=0)

    def test_is_relative_to_the_tiles_own_scale(self):
        unit = self.TILE / self.TILE.std((-2, -1), correction=0, keepdim=True)
        expected = imbalance_trace(unit, 4, relative=False)
        torch.testing.assert_close(imbalance_trace(self.TILE, 4), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(imbalance_trace(1e-6 * self.TILE, 4), expected, rtol=1e-5, atol=0)
        assert (expected[..., 4] < expected[..., 0] / 2).all()

    def test_constant_and_zero_tiles(self):
        assert torch.equal(imbalance_trace(torch.zeros(8, 8), 2), torch.full((3,), 2.0))
        assert torch.equal(imbalance_trace(torch.ones(8, 8), 2), torch.full((3,), 2.0))
