"""One token of a transformer decoder: the caches of keys and values are inputs, all their rows."""

import torch
from torch import nn
from torch.nn import functional as nnf


class DecoderLayer(nn.Module):
    """Attention of one token over a cache and itself, then an MLP; norms before both."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, keys, values):
        batch, _, width = x.shape
        y = self.norm1(x)

        def split(z):
            return z.view(batch, 1, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.q(y)), split(self.k(y)), split(self.v(y))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        y = nnf.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, width))
        return x + self.down(nnf.gelu(self.up(self.norm2(x)))), keys, values


class Decoder(nn.Module):
    """Some layers, and the caches one row longer."""

    def __init__(self, layers=2, width=64, heads=4):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))

    def forward(self, x, *caches):
        longer = []
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x, keys, values = layer(x, keys, values)
            longer += [keys, values]
        return x, *longer


def decoder(layers=2, width=64, heads=4, rows=16, batch=1, seed=0):
    """A decoder and the inputs of a call."""
    torch.manual_seed(seed)
    module = Decoder(layers, width, heads).eval()
    cache = (batch, heads, rows, width // heads)
    return module, (torch.randn(batch, 1, width), *(torch.randn(cache) for _ in range(2 * layers)))
