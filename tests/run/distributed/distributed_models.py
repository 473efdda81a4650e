"""Small models of the forms that people train, each with its loss and the arguments of a call."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

BATCH = 8


class MLP(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(dropout) if dropout else None

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
            x = x if self.drop is None else self.drop(x)
        return F.cross_entropy(self.layers[-1](x), y)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, positions, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, positions, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.drop = nn.Dropout(dropout)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        x = self.drop(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x, y):
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.conv(x)) + x)
        return F.cross_entropy(self.head(F.max_pool2d(x, 2).mean((2, 3))), y)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x, y):
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        c = F.relu(self.middle(F.max_pool2d(b, 2)))
        c = F.interpolate(c, scale_factor=2)
        d = F.relu(self.up2(torch.cat([c, b], 1)))
        return F.mse_loss(self.up1(torch.cat([F.interpolate(d, scale_factor=2), a], 1)), y)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.layers = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x, y):
        x = self.layers(self.tokens(x))[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class MoE(nn.Module):
    """Every expert sees every token, weighted by its gate; two gates of four are kept."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(16, 4), nn.Linear(16, 16)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x, y):
        gates = self.gate(x).softmax(-1)
        kept = gates.topk(2, -1).values[:, 1:]
        gates = torch.where(gates >= kept, gates, torch.zeros_like(gates))
        hidden = F.gelu(torch.einsum("bi,eih->beh", x, self.up))
        mixed = torch.einsum("beh,ehi,be->bi", hidden, self.down, gates)
        logits = torch.addmm(self.head.bias, x + mixed, self.head.weight.t())  # becomes two ops
        return F.cross_entropy(logits, y)


class T5(nn.Module):
    """An encoder and a decoder that reads it; the embedding is used three times."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.encoder = Block(16, 2)
        self.decoder = Block(16, 2)
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)
        self.norm = nn.LayerNorm(16)

    def forward(self, x, y):
        memory = self.encoder(self.tokens(x))
        state = self.decoder(self.tokens(y))
        k, v = self.kv(memory).chunk(2, -1)
        weights = (self.q(state) @ k.mT / 4).softmax(-1)
        state = self.norm(state + weights @ v)
        return F.cross_entropy(F.linear(state, self.tokens.weight).flatten(0, 1), y.flatten())


class Masks(nn.Module):
    """Whatever draws: dropout of activations and of attention, a path, channels for all samples."""

    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.qkv = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(16, 32)

    def forward(self, x, y):
        batch, positions = x.shape
        x = F.dropout(self.tokens(x), 0.2, self.training)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.view(batch, positions, 4, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, positions, 16))
        if self.training:
            mixed = mixed * (mixed.new_empty(batch, 1, 1).bernoulli_(0.7) / 0.7)
        x = x + mixed
        hidden = F.dropout(F.gelu(self.up(x)).transpose(0, 1), 0.2, self.training).transpose(0, 1)
        x = x + self.down(hidden)
        if self.training:
            x = x * (torch.rand(16, device=x.device) > 0.1)
        x = x + self.layers(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def ids(limit, *shape):
    return torch.randint(limit, shape)


def make(name):
    """A model, always the same one, and its arguments."""
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(), (torch.randn(BATCH, 16), ids(16, BATCH))
    if name == "mlp-dropout":
        return MLP(dropout=0.3), (torch.randn(BATCH, 16), ids(16, BATCH))
    if name == "gpt":
        return GPT(), (ids(32, BATCH, 8), ids(32, BATCH, 8))
    if name == "gpt-dropout":
        return GPT(0.2), (ids(32, BATCH, 8), ids(32, BATCH, 8))
    if name == "resnet":
        return ResNet(), (torch.randn(BATCH, 3, 8, 8), ids(8, BATCH))
    if name == "unet":
        return UNet(), (torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8))
    if name == "lstm":
        return LSTM(), (ids(16, BATCH, 6), ids(16, BATCH, 6))
    if name == "masks":
        return Masks(), (ids(32, BATCH, 8), ids(32, BATCH, 8))
    if name == "moe":
        return MoE(), (torch.randn(BATCH, 16), ids(16, BATCH))
    if name == "t5":
        return T5(), (ids(32, BATCH, 6), ids(32, BATCH, 6))
    if name == "mse":  # another loss, and another model than "mlp"
        return nn.Linear(4, 4), (torch.randn(BATCH, 4),)
    raise KeyError(name)
