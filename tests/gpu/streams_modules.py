"""Small models with everything the passes look for."""

import torch
from torch import nn
from torch.nn import functional as nnf


class Unit(nn.Module):
    """Convolution, norm, ReLU."""

    def __init__(self, cin, cout, kernel=1, stride=1, padding=0, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return nnf.relu(self.bn(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Two Inception-like blocks: branches of one input, concatenated, one of them an average."""

    def __init__(self):
        super().__init__()
        self.stem = Unit(3, 16, 3, 2, 1)
        self.a1, self.b1, self.b2 = Unit(16, 8), Unit(16, 8), Unit(8, 16, 3, 1, 1)
        self.p1 = Unit(16, 8)
        self.c1, self.d1 = Unit(32, 16), Unit(32, 8, (1, 3), 1, (0, 1))
        self.fc = nn.Linear(56, 5)

    def forward(self, x):
        x = self.stem(x)
        pooled = self.p1(nnf.avg_pool2d(x, 3, 1, 1))
        x = torch.cat([self.a1(x), self.b2(self.b1(x)), pooled], 1)
        x = torch.cat([self.c1(x), self.d1(x), nnf.max_pool2d(x, 3, 1, 1)], 1)
        return self.fc(torch.flatten(nnf.adaptive_avg_pool2d(x, 1), 1))


class Dense(nn.Module):
    """A dense block: norm and ReLU before each convolution, lists that grow."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 8 * n) for n in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 8 * n, 8, 1, bias=False) for n in range(3))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        forward = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            forward.append(conv(nnf.relu(norm(torch.cat(forward, 1)))))
        return torch.cat(forward, 1)


class Separable(nn.Module):
    """ReLU, depthwise, pointwise, norm; sums with weights; a residual; odd numbers of channels."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 13, 3, padding=1)
        self.depth = nn.ModuleList(nn.Conv2d(13, 13, 3, padding=1, groups=13) for _ in range(3))
        self.point = nn.ModuleList(nn.Conv2d(13, 13, 1, bias=False) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm2d(13) for _ in range(3))
        self.gates = nn.Parameter(torch.randn(2))

    def node(self, number, x):
        return self.norm[number](self.point[number](self.depth[number](nnf.relu(x))))

    def forward(self, x):
        x = self.first(x)
        a, b = self.node(0, x), self.node(1, x)
        one, two = torch.sigmoid(self.gates).split(1)
        c = self.node(2, a * one + b * two)
        pooled = nnf.avg_pool2d(x, 3, 1, 1)
        return nnf.relu(c + x) + (pooled + pooled) / 3


class Grouped(nn.Module):
    """A grouped convolution and a projection, as in ResNeXt."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Unit(3, 32, 3, 1, 1), Unit(32, 32, 3, 2, 1, groups=8)
        self.three, self.short = nn.Conv2d(32, 16, 1), nn.Conv2d(32, 16, 1, 2)

    def forward(self, x):
        x = self.one(x)
        return nnf.relu(self.three(self.two(x)) + self.short(x))


MODULES = {"branches": Branches, "dense": Dense, "separable": Separable, "grouped": Grouped}


def made(name):
    """A module with norms that do something, and an image for it."""
    torch.manual_seed(0)
    module = MODULES[name]()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.5, 0.5)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.5, 0.5)
    return module.eval(), torch.randn(2, 3, 12, 10)
