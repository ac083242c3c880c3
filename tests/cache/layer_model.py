"""A plain-tensor model of a layer: all tokens, sinks, tiles and tail."""

import torch

from kvarn_hf.method.quantize import dequantize_keys, dequantize_values, key_prescale, quantize_keys, quantize_values

SINK, TILE, RESIDUAL = 16, 64, 32


class LayerModel:
    """All tokens as they were given, and of every tile what it dequantizes to after being quantized once.

    Rows are treated one by one. In a batch, a run of two or more tokens equal to a row's first is padding: it is exact,
    the row's sinks begin behind it, and it shapes neither the row's pre-scale nor its tiles.
    """

    def __init__(self, config, keys, values):
        self.config = config
        self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        self.tiles = []  # (keys, values) of each, [row, head, TILE, head_dim]
        self.prescale = None
        self.watches_padding = False
        self.quantized = 0  # tiles times rows

    @property
    def length(self):
        return self.keys.shape[2]

    @property
    def batch(self):
        return self.keys.shape[0]

    @property
    def tail_start(self):
        return self.config.sink_length + len(self.tiles) * TILE if self.tiles else 0

    def padding(self, row):
        if not self.watches_padding:
            return 0
        run = 0
        while run < self.length and all(torch.equal(x[row, :, run], x[row, :, 0]) for x in (self.keys, self.values)):
            run += 1
        return run if run > 1 else 0

    def append(self, keys, values):
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def due(self, new=0):
        return max(0, self.config.packed_tiles(self.length + new) - len(self.tiles))

    def commit(self):
        due, config = self.due(), self.config
        if not due:
            return
        if not self.tiles:
            self.watches_padding = self.batch > 1
            self.prescale = torch.ones(*self.keys.shape[:2], self.keys.shape[3], dtype=torch.float16)
        start = config.sink_length + len(self.tiles) * TILE
        rows = []
        for row in range(self.batch):
            first = self.padding(row) + config.sink_length
            if config.method == "kvarn" and start <= first < start + due * TILE:
                # As many tokens of the row's first tile as are there whenever that tile is due.
                end = start
                while end <= first:
                    end += TILE
                window = self.keys[row, :, first : min(first + TILE, end + config.residual_length)]
                whole = torch.cat([window] * TILE, 1)[:, :TILE]
                self.prescale[row] = key_prescale(whole)
            prescale = self.prescale[row] if config.method == "kvarn" else None
            parts = [self.tile_tokens(row, start + i * TILE, first) for i in range(due)]
            keys, values = (torch.stack(side) for side in zip(*parts, strict=True))
            keys = dequantize_keys(quantize_keys(keys, prescale, config), prescale, config)
            values = dequantize_values(quantize_values(values, config), config)
            rows.append((keys.to(self.keys.dtype), values.to(self.values.dtype)))
        for i in range(due):
            self.tiles.append((torch.stack([k[i] for k, _ in rows]), torch.stack([v[i] for _, v in rows])))
        self.quantized += due * self.batch

    def tile_tokens(self, row, start, first):
        """What is quantized: tokens that are kept exactly elsewhere are replaced by the later ones, over and over."""
        source = list(range(start, start + TILE))
        counted = [t for t in source if t >= first]
        if counted:
            while len(counted) < TILE:
                counted = counted[-(TILE - (first - start)) :] + counted
            source = counted[-TILE:]
        return self.keys[row][:, source], self.values[row][:, source]

    def read(self):
        keys, values = self.keys.clone(), self.values.clone()
        for i, (tile_keys, tile_values) in enumerate(self.tiles):
            start = self.config.sink_length + i * TILE
            for row in range(self.batch):
                exact = min(max(0, self.padding(row) + self.config.sink_length - start), TILE)
                for x, tile in ((keys, tile_keys), (values, tile_values)):
                    x[row, :, start + exact : start + TILE] = tile[row, :, exact:]
        return keys, values

    def crop(self, length):
        """False if the cut would go through a tile."""
        sink = self.config.sink_length
        if length >= self.length:
            return True
        if sink < length < self.tail_start and (length - sink) % TILE:
            return False
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        if length < self.tail_start:
            self.tiles = self.tiles[: max(0, length - sink) // TILE]
        return True

    def select(self, rows):
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.tiles = [(k[rows], v[rows]) for k, v in self.tiles]
        self.prescale = None if self.prescale is None else self.prescale[rows]
