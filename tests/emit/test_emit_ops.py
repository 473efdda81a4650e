"""Operators one by one: what is written computes what was captured, gradients included."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from partita.capture import export_module
from partita.emit.stages import emit
from tests.emit.transparency import Model, assert_ruff_has_nothing_to_say

T = torch.Tensor
X = (2, 3, 8)
IMAGE = (2, 4, 8, 8)


def seeded(*shape: int) -> T:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


GIVEN = {shape: seeded(*shape) for shape in (
    (1, 8), (4,), (4, 2, 3, 3), (4, 4, 3, 3), (5,), (5, 3), (5, 3, 3), (8,),
)}  # fmt: skip


def given(*shape: int) -> T:
    """A tensor that was there before the model was."""
    return GIVEN[shape]


# name -> (function of one tensor, its shape)
OPS = {
    "alpha": (lambda x: torch.add(x, x.flip(0), alpha=2) - torch.sub(x, x, alpha=0.5), X),
    "rsub": (lambda x: 1 - x + torch.rsub(x, 2, alpha=3), X),
    "divisions": (lambda x: x / 3 + torch.div(x, 0.7, rounding_mode="floor") + x % 2, X),
    "powers": (lambda x: x**2 + x.abs() ** 0.5 + 2**x + x.abs() ** x + x**-1 + x**True, X),
    "comparisons": (lambda x: ((x > 0) & (x <= 1) | (x == 2) ^ (x != True)).float() * x, X),  # noqa: E712
    "not": (lambda x: torch.where(~(x > 0), -x, x * 2), X),
    "where_scalar": (lambda x: torch.where(x > 0, 1.0, x) + torch.where(x > 1, x, 0.0), X),
    "slices": (lambda x: x[:, 1:, ::2] + x[..., :4][:, 1:] + x[:, -2:, 1:8:2], X),
    "select": (lambda x: x[0] + x[-1] + x[:, 0, None] + x[..., 3, None], X),
    "index": (lambda x: x[:, [0, 2]] + x[torch.tensor([1, 0])][:, 1:], X),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1), X),
    "index_put": (lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), given(1, 8)), X),
    "scatter": (lambda x: x.scatter(1, torch.zeros(2, 1, 8, dtype=torch.long), 0.5), X),
    "gather": (lambda x: x.gather(2, torch.arange(6).view(2, 3, 1) % 8), X),
    "chunk": (lambda x: sum(x.chunk(4, dim=-1)) + torch.split(x, [2, 6], 2)[0], X),
    "split": (lambda x: x.split(4, 2)[1] * torch.stack(x.unbind(2), -1).split(4, -1)[0], X),
    "single": (lambda x: x.split(8, 2)[0] + x.chunk(1)[0], X),
    "shapes": (lambda x: x.view(6, 8).t().reshape(2, 4, 6).permute(2, 0, 1).flatten(1), X),
    "movements": (lambda x: x.movedim(0, 2).swapaxes(0, 1).unsqueeze(-1).squeeze(-1).squeeze(), X),
    "expands": (lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1).repeat(1, 1, 2, 1).mT, X),
    "roll": (lambda x: torch.roll(x, 1, 0) + x.flip(-1) + torch.rot90(x, 2, (1, 2)), X),
    "sums": (
        lambda x: x.sum() + x.sum(1)[0, 0] + x.sum((0, 2), keepdim=True)[0] * x.mean(-1).sum(0)[0],
        X,
    ),
    "extremes": (
        lambda x: x.max() + x.max(-1)[0] + x.min(1, keepdim=True).values.squeeze(1).amax(),
        X,
    ),
    "statistics": (lambda x: x.var(-1) + x.std(-1, unbiased=False) + torch.var_mean(x, 2)[1], X),
    "sorting": (lambda x: x.sort(-1)[0] + x.topk(3, -1).values.sum(-1, keepdim=True), X),
    "argmax": (lambda x: x * x.argmax(-1, keepdim=True) + x.cumsum(-1) + x.argsort(-1), X),
    "norms": (lambda x: x / x.norm(dim=-1, keepdim=True) + torch.linalg.vector_norm(x), X),
    "normalize": (
        lambda x: F.normalize(x, dim=-1) + F.cosine_similarity(x, x + 1, dim=-1)[..., None],
        X,
    ),
    "clamps": (lambda x: x.clamp(-1, 1) + x.clamp(min=0) + F.hardtanh(x) + F.relu6(x), X),
    "rounding": (lambda x: x + x.floor() + x.ceil() + x.round() + x.trunc() + x.sign(), X),
    "exponents": (lambda x: x.exp() + x.abs().log1p() + x.sigmoid() + x.tanh() + x.erf(), X),
    "roots": (
        lambda x: x.abs().sqrt() + x.abs().add(1).rsqrt() + x.square() + x.sin() * x.cos(),
        X,
    ),
    "activations": (
        lambda x: (
            F.gelu(x)
            + F.gelu(x, approximate="tanh")
            + F.silu(x)
            + F.elu(x, 0.5)
            + F.selu(x)
            + F.leaky_relu(x, 0.2)
            + F.softplus(x, 2)
            + F.mish(x)
            + F.hardswish(x)
            + F.logsigmoid(x)
            + F.celu(x, 0.3)
            + F.softsign(x)
            + F.hardsigmoid(x)
            + F.tanhshrink(x)
        ),
        X,
    ),
    "softmaxes": (
        lambda x: F.softmax(x, -1) + F.log_softmax(x, 1) + torch.logsumexp(x, 2, True),
        X,
    ),
    "glu": (lambda x: F.glu(x, -1), X),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.3])), X),
    "products": (lambda x: x @ x.mT + torch.bmm(x, x.transpose(1, 2)) + torch.matmul(x, x.mT), X),
    "fused": (lambda x: torch.addmm(x[0, :, :3], x[0], x[1].T, beta=0.5, alpha=2), X),
    "batched": (
        lambda x: torch.baddbmm(x[:, :, :3], x, x.mT) + torch.einsum("bik,bjk->bij", x, x),
        X,
    ),
    "outer": (
        lambda x: torch.outer(x[0, 0], x[0, 1]) + torch.tensordot(x, x.permute(1, 2, 0), 2).sum(),
        X,
    ),
    "triangles": (lambda x: (x @ x.mT).tril() + (x @ x.mT).triu(1), X),
    "types": (lambda x: (x.to(torch.float64) * 2).float() + x.half().to(x.dtype) + x.int(), X),
    "likes": (lambda x: x + torch.ones_like(x) + x.new_zeros(3, 8) + torch.full_like(x, 2), X),
    "as": (lambda x: x[:1].expand_as(x) + x.view(6, 8).view_as(x) + x.type_as(x), X),
    "creation": (
        lambda x: (
            x
            + torch.arange(8)
            + torch.linspace(0, 1, 8)
            + torch.eye(8)[:3]
            + torch.full((3, 8), 0.5)
            + torch.zeros(8, dtype=torch.float64).float()
        ),
        X,
    ),
    "constants": (lambda x: x * torch.tensor([0.1] * 8) + torch.tensor(float("inf")).isinf(), X),
    "meshgrid": (
        lambda x: x[0] * torch.meshgrid(torch.arange(3), torch.arange(8), indexing="ij")[0],
        X,
    ),
    "conv1d": (lambda x: F.conv1d(x, given(5, 3, 3), given(5), stride=2, padding=1), X),
    "conv2d": (
        lambda x: F.conv2d(x, given(4, 2, 3, 3), groups=2, padding=(1, 0), dilation=2),
        IMAGE,
    ),
    "same": (lambda x: F.conv2d(x, given(4, 4, 3, 3), padding="same"), IMAGE),
    "transposed": (
        lambda x: F.conv_transpose2d(x, given(4, 2, 3, 3), stride=2, output_padding=1),
        IMAGE,
    ),
    "pools": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.max_pool2d(x, 3, 2, 1), IMAGE),
    "ceil_pools": (
        lambda x: (
            F.max_pool2d(x, 3, 3, ceil_mode=True)
            + F.avg_pool2d(x, 3, 3, ceil_mode=True, count_include_pad=False)
        ),
        IMAGE,
    ),
    "divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), IMAGE),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], IMAGE),
    "adaptive": (
        lambda x: F.adaptive_avg_pool2d(x, (2, 4)) + F.adaptive_max_pool2d(x, (2, 4)),
        IMAGE,
    ),
    "resize": (
        lambda x: (
            F.interpolate(x, scale_factor=2)
            + F.interpolate(x, size=(16, 16), mode="bilinear")
            + F.interpolate(x, size=16, mode="bicubic", align_corners=True)
        ),
        IMAGE,
    ),
    "pads": (
        lambda x: F.pad(x, (1, 2)) + F.pad(x, (1, 2), value=3.0) + F.pad(x, (1, 2), mode="reflect"),
        X,
    ),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2) + F.unfold(x, 2, stride=2).sum(), IMAGE),
    "norm_layers": (
        lambda x: (
            F.layer_norm(x, (8, 8))
            + F.group_norm(x, 2, given(4), given(4), 1e-3)
            + F.instance_norm(x)
            + F.batch_norm(x, None, None, training=True)
            + F.rms_norm(x, (8,), given(8))
            + F.local_response_norm(x, 2)
        ),
        IMAGE,
    ),
    "frozen_norm": (lambda x: F.batch_norm(x, given(4), given(4).abs(), eps=1e-3), IMAGE),
    "embedding": (
        lambda x: (
            F.embedding(x.long().clamp(0, 4), given(5, 3), padding_idx=1) + 0 * x[..., None].sum()
        ),
        X,
    ),
    "one_hot": (lambda x: F.one_hot(x.long().clamp(0, 3), 4) * x[..., None], X),
    "losses": (
        lambda x: (
            F.mse_loss(x, x + 1)
            + F.l1_loss(x, x * 2, reduction="sum")
            + F.smooth_l1_loss(x, x + 1)
            + F.cross_entropy(x.flatten(0, 1), torch.arange(6) % 8, label_smoothing=0.1)
            + F.nll_loss(F.log_softmax(x, 1), torch.zeros(2, 8, dtype=torch.long), reduction="sum")
            + F.binary_cross_entropy_with_logits(x, (x > 0).float(), pos_weight=given(8).abs())
            + F.binary_cross_entropy_with_logits(x, (x > 0).float())
            + F.binary_cross_entropy(x.sigmoid(), (x > 0).float(), reduction="none").sum()
            + F.huber_loss(x, x + 2)
            + F.soft_margin_loss(x, x.detach().sign())
            + F.kl_div(F.log_softmax(x, 1), F.softmax(x, 1), reduction="batchmean")
            + F.cross_entropy(x.flatten(0, 1), torch.arange(6) % 8, given(8).abs(), ignore_index=1)
        ),
        X,
    ),
    "attention": (
        lambda x: (
            F.scaled_dot_product_attention(x, x, x)
            + F.scaled_dot_product_attention(x, x, x, scale=0.3, is_causal=True)
        ),
        X,
    ),
    "detached": (lambda x: x * x.detach() + x.clone(), X),
    "lerp": (lambda x: torch.lerp(x, x + 1, 0.3) + torch.addcmul(x, x, x, value=0.5), X),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])) * x, X),
    "complex": (lambda x: torch.view_as_real(torch.fft.rfft(x)) * x.sum(), X),
    "polar": (lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x)), X),
}


class Op(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, shape = OPS[name]
        self.x = nn.Parameter(seeded(*shape))

    def forward(self, scale: T) -> T:
        return self.function(self.x * scale)


@functools.cache
def model(name: str) -> Model:
    scale = torch.tensor(1.5)
    return Model(export_module(Op(name), (scale,)), (scale,), {})


@pytest.mark.parametrize("name", OPS)
def test_an_operator_is_written_as_what_it_is(name):
    it = model(name)
    it.assert_same(dict.fromkeys(it.ops, 0))
    it.assert_same({op: i % 2 + 2 * (i // 2) for i, op in enumerate(it.ops)})


def test_the_code_of_every_operator_is_formatted_and_clean(tmp_path):
    for name in OPS:
        it = model(name)
        half = {op: int(i > len(it.ops) // 2) for i, op in enumerate(it.ops)}
        source = emit(it.captured, half).source
        (tmp_path / f"{name}.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)
