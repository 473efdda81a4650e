"""A small decoder that gives its loss: what the exported FSDP2 code is run on."""

import torch
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 8


class Layer(nn.Module):
    """Attention and a feed-forward part; the number of heads follows what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm1(x)
        parts = (part(seen) for part in (self.q, self.k, self.v))
        q, k, v = (p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """The loss of next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The module and the arguments of a call."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (batch, LENGTH + 1))
    return Decoder(), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
