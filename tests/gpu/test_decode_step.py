"""One token of a Llama-like decoder: the kernels in Triton's interpreter against plain PyTorch."""

from dataclasses import replace

import pytest
from in_interpreter import in_interpreter

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn  # noqa: E402

from partita.errors import InputError, VerificationError  # noqa: E402
from partita.gpu.bounds import check_inside  # noqa: E402
from partita.gpu.decode.plain import PlainDecoder  # noqa: E402
from partita.gpu.decode.spec import DecoderSpec  # noqa: E402
from partita.gpu.decode.step import decode_step, step_reaches  # noqa: E402
from partita.gpu.decode.weights import decoder_weights  # noqa: E402

SPEC = DecoderSpec(2, 48, 4, 2, 16, 72, 50, 40)

STEPS = """
import torch
from partita.gpu.decode.plain import PlainDecoder
from partita.gpu.decode.spec import ProductBlock, DecoderSpec, KINDS, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import decoder_weights

from partita.gpu.decode import step as steps

steps.JOINED = 64  # chunks are added up in several rounds
torch.manual_seed(0)
for spec, block, chunk in (
    (DecoderSpec(2, 48, 4, 2, 16, 72, 50, 40), ProductBlock(16, 64), 16),
    (DecoderSpec(1, 64, 3, 3, 32, 64, 33, 20), ProductBlock(16, 32), 16),
    (DecoderSpec(1, 64, 6, 2, 32, 64, 33, 20), ProductBlock(8, 64, 4, 1), 16),
    (DecoderSpec(1, 48, 4, 2, 16, 72, 50, 40), ProductBlock(8, 32, 4, 2), 64),
    (DecoderSpec(1, 48, 4, 2, 16, 72, 50, 40, batch=3), ProductBlock(16, 16, split=2), 16),
):
    model = PlainDecoder(spec)
    blocks = dict.fromkeys(KINDS, block)
    options = StepOptions(blocks, {**blocks, "gate": ProductBlock(16, 32)}, chunk=chunk)
    step = DecodeStep(decoder_weights(model, spec.length, spec.batch), options)
    shape = step.keys.shape
    keys, values = torch.randn(shape), torch.randn(shape)
    step.keys.copy_(keys)
    step.values.copy_(values)
    with torch.no_grad():
        edges = (0, chunk - 1, chunk, spec.length - 1)
        if chunk < spec.length and spec.batch == 1 and spec.layers > 1:
            edges += (1, chunk + 1)
        for position in sorted({min(edge, spec.length - 1) for edge in edges}):
            token = torch.randint(spec.vocab, (spec.batch,))
            step.logits.fill_(float("nan"))
            found = step(token if spec.batch > 1 else int(token), position)
            wanted = model(token, torch.tensor([position]), keys, values)
            error = (found - wanted).norm() / wanted.norm()
            assert error < 1e-5, (spec, position, error)
            assert torch.allclose(step.keys, keys, atol=1e-5), (spec, position)
            assert torch.allclose(step.values, values, atol=1e-5)
            assert not step.count.any() and not step.shares_done.any()
        if spec.batch > 1:  # every sample at a place of its own
            places = torch.tensor([5, 0, spec.length - 1])
            found = step(token, places).clone()
            for sample, place in enumerate(places):
                alone = [each[:, sample : sample + 1] for each in (keys, values)]
                wanted = model(token[sample : sample + 1], place[None], *alone)
                assert (found[sample] - wanted[0]).norm() < 1e-5 * wanted.norm(), place
            assert torch.allclose(step.keys, keys, atol=1e-5)
            assert torch.allclose(step.values, values, atol=1e-5)
print("all right")
"""


def test_a_step_computes_the_model_at_every_edge_of_a_chunk():
    assert in_interpreter(STEPS) == "all right\n"


def test_a_model_that_is_no_llama_is_refused():
    with pytest.raises(InputError, match=r"Linear is not built like a Llama.*partita.accelerate"):
        decoder_weights(nn.Linear(3, 3), 8)


def test_other_types_parts_and_the_cpu_are_refused():
    model = PlainDecoder(SPEC)
    with pytest.raises(InputError, match="the model is on cpu; put it on the GPU"):
        decode_step(model)
    with pytest.raises(InputError, match=r"weights of torch.float64; use float32"):
        decoder_weights(PlainDecoder(SPEC).double(), 8)
    model.model.layers[0].mlp.scale = nn.Parameter(torch.zeros(72))
    with pytest.raises(InputError, match=r"PlainDecoder has mlp.scale, which a step does not read"):
        decoder_weights(model, 8)
    model = PlainDecoder(SPEC)
    model.lm_head.bias = nn.Parameter(torch.zeros(50))
    with pytest.raises(InputError, match=r"lm_head.bias is a bias; a head without a bias"):
        decoder_weights(model, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_size": 24}, "heads of 24; 16, 32, 64, 128 and 256 can be run"),
        ({"kv_heads": 3}, "4 heads share 3 key heads"),
        ({"length": 0}, "length: a cache of 0 rows; give 1 or more"),
    ],
)
def test_sizes_that_cannot_be_run_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        replace(SPEC, **change)


def test_weights_that_are_too_small_are_refused_before_a_launch():
    weights = decoder_weights(PlainDecoder(SPEC), 40)
    check_inside("a step", step_reaches(SPEC, weights))
    for change in ({"hidden": 80}, {"vocab": 51}, {"width": 56}, {"length": 41}):
        with pytest.raises(VerificationError, match="a step would leave its memory"):
            check_inside("a step", step_reaches(replace(SPEC, **change), weights))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from partita.gpu.kernels import transformer


def compiled(kernel, pointers, constants):
    names = kernel.arg_names
    signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
    at = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=at, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


wide, narrow = "*fp32", "*bf16"
made = compiled(
    transformer.rows,
    dict(x=narrow, norm=narrow, shift=narrow, w=narrow, bias=narrow, out=narrow, copy=narrow,
         residual=wide),
    dict(EPS=1e-5, N=64, K=2048, NORM=True, CENTERED=False, BIAS=False, ACT=1, GATED=True,
         RESIDUAL=False, COPY=False, PDL=True, BN=4, BK=1024, EACH=8),
)
assert "griddepcontrol.wait" in made.asm["ptx"]
compiled(  # GPT-2's first product of an MLP
    transformer.rows,
    dict(x=narrow, norm=narrow, shift=narrow, w=narrow, bias=narrow, out=narrow, copy=narrow,
         residual=wide),
    dict(EPS=1e-5, N=3072, K=768, NORM=True, CENTERED=True, BIAS=True, ACT=2, GATED=False,
         RESIDUAL=False, COPY=False, PDL=True, BN=2, BK=1024, EACH=8),
)
assert "v4.b32" in made.asm["ptx"]  # loads of 16 bytes
compiled(
    transformer.attend,
    dict(qkv=wide, keys=narrow, values=narrow, position="*i64", cosines=wide, sines=wide,
         q_norm=narrow, k_norm=narrow, part=wide, stats=wide, count="*i32", out=wide),
    dict(SCALE=0.125, EPS=1e-5, HEAD_NORM=True, HEADS=32, GROUP=4, GP=16, GJ=4, D=64, LENGTH=512,
         SPLITS=8, SB=8, CHUNK=64, PDL=True),
)
from partita.gpu.decode.spec import StepOptions

options = StepOptions()
for kind in ("gate", "head"):  # the largest: what is loaded ahead has room on a unit
    block, gated = options.batched[kind], kind == "gate"
    for dtype, size in (("*bf16", 2), ("*fp32", 4)):
        made = compiled(
            transformer.rows_of_batch,
            dict(x=dtype, norm=dtype, shift=dtype, w=dtype, bias=dtype, out=dtype, copy=dtype,
                 residual=wide, part=wide, count="*i32"),
            dict(EPS=1e-5, N=8192, K=4096, NORM=gated, CENTERED=gated, BIAS=True, ACT=int(gated),
                 GATED=gated, RESIDUAL=not gated, COPY=not gated, PDL=True, BN=block.rows,
                 BK=block.cols * 2 // size, BATCH=8, BB=16, SPLIT=block.split,
                 STAGES=options.stages),
        )
        assert made.metadata.shared <= 227 * 1024, (kind, dtype, made.metadata.shared)
several = compiled(
    transformer.rows_of_batch,
    dict(x=narrow, norm=narrow, shift=narrow, w=narrow, bias=narrow, out=narrow, copy=narrow,
         residual=wide, part=wide, count="*i32"),
    dict(EPS=1e-5, N=64, K=2048, NORM=True, CENTERED=False, BIAS=False, ACT=0, GATED=False,
         RESIDUAL=True, COPY=True, PDL=True, BN=16, BK=256, BATCH=5, BB=16, SPLIT=4, STAGES=3),
)
assert "mma.sync" in several.asm["ptx"] and "cp.async" in several.asm["ptx"]
print("all right")
"""


def test_the_kernels_compile_for_a_hopper_gpu():
    from in_interpreter import in_a_process

    assert in_a_process(COMPILED) == "all right\n"
