"""Models as people write them: nested modules, loops, skips, tied weights, unregistered masks."""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

T = torch.Tensor


def ids(most: int, *shape: int) -> T:
    """Random whole numbers."""
    return torch.randint(most, shape)


class Attention(nn.Module):
    """Causal attention spelled out, its mask a buffer that is not saved."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        mask = torch.ones(positions, positions, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: T) -> T:
        b, s, d = x.shape
        q, k, v = self.qkv(x).split(d, dim=2)
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~self.mask[:s, :s], float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.proj(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, positions)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: T) -> T:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A GPT with tied weights that gives logits and loss in a dict."""

    def __init__(
        self, vocab: int = 97, width: int = 32, layers: int = 3, positions: int = 16
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList([Block(width, 4, positions) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: T, targets: T) -> dict[str, T]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class Bottleneck(nn.Module):
    """ResNet's block, in place where ResNet is."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: T) -> T:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A narrow ResNet of two stages."""

    def __init__(self, width: int = 4, blocks: tuple[int, ...] = (2, 3)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs, self.layers = width, nn.ModuleList()
        for level, count in enumerate(blocks):
            inner, made = width * 2**level, []
            for number in range(count):
                made.append(Bottleneck(inputs, inner, 2 if level and not number else 1))
                inputs = 4 * inner
            self.layers.append(nn.Sequential(*made))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, 5)

    def forward(self, x: T) -> T:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UNet(nn.Module):
    """Two levels down and up, with long skips."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = self._double(1, width), self._double(width, 2 * width)
        self.middle = self._double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = self._double(4 * width, 2 * width)
        self.up1 = nn.Upsample(scale_factor=2, mode="nearest")
        self.join1 = self._double(3 * width, width)
        self.head, self.pool = nn.Conv2d(width, 2, 1), nn.MaxPool2d(2)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.LeakyReLU(0.1),
        )  # fmt: skip

    def forward(self, x: T) -> tuple[T, T]:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.middle(self.pool(second))
        x = self.join2(torch.cat([second, self.up2(x)], dim=1))
        x = self.join1(torch.cat([first, self.up1(x)], dim=1))
        return self.head(x), second.mean(dim=(2, 3))


class LanguageModel(nn.Module):
    """Embedding, LSTM, linear; the last state is returned."""

    def __init__(self, vocab: int = 97, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids: T) -> tuple[T, tuple[T, T]]:
        y, (h, c) = self.rnn(self.embed(ids))
        return self.out(y), (h, c)
