"""The Triton kernels against PyTorch, in Triton's interpreter: no GPU needed, but Triton is."""

import pytest
from in_interpreter import in_interpreter

pytest.importorskip("triton")

CASES = """
import sys, torch
from partita.gpu.streams.bound import Bound
from partita.gpu.flow.eager import compute
from partita.gpu.flow.place import place
from partita.gpu.flow.steps import Flow, Step, Window
from partita.gpu.streams.ways import ways

torch.manual_seed(0)
randn = torch.randn


def check(step, shapes, constants):
    values = {name: randn(shape) for name, shape in shapes.items()}
    wanted = compute(step, values, constants)
    everything = {**shapes, "y": tuple(wanted.shape)}
    dtypes = dict.fromkeys(everything, torch.float32)
    flow, placement = place(Flow((step,), tuple(shapes), ("y",), everything, dtypes, constants))
    bound = Bound(flow, placement, torch.device("cpu"))
    bound.set_inputs(tuple(values.values()))
    tried = [way for way in ways(flow, step) if way.kernel != "eager"]
    plain = step.kind == "conv" and step.groups == 1 and not step.pre
    exact = ways(flow, step, exact=True)[:1] if plain else ()
    for way in (tried[0], tried[-1], *exact):
        bound.values["y"].fill_(float("nan"))
        for _ in range(2):  # counters of split sums must be as before
            bound.run(step, way)
        error = (bound.logical("y") - wanted).norm() / wanted.norm()
        assert error < 2e-3, f"{step} {way}: {error}"
        assert not bound.values["y"][:, wanted.shape[1] :].any()  # the padding stays zero


conv = dict(weight="w", relu=True)
check(Step("y", "conv", ("x",), window=Window((3, 3), padding=(1, 1)), bias="b", **conv),
      {"x": (1, 20, 9, 9)}, {"w": randn(40, 20, 3, 3), "b": randn(40)})
check(Step("y", "conv", ("x",), window=Window((1, 7), padding=(0, 3)), residual="r", pre="relu",
           **conv), {"x": (2, 21, 9, 9), "r": (2, 43, 9, 9)}, {"w": randn(43, 21, 1, 7)})
check(Step("y", "conv", ("x",), window=Window((1, 1)), bias="b", relu_from=8, pre="affine_relu",
           pre_scale="s", pre_shift="t", **conv), {"x": (1, 200, 7, 7)},
      {"w": randn(64, 200, 1, 1), "b": randn(64), "s": randn(200), "t": randn(200)})
check(Step("y", "conv", ("x",), window=Window((3, 3), (2, 2), (1, 1)), groups=16, **conv),
      {"x": (1, 64, 9, 9)}, {"w": randn(64, 4, 3, 3)})
check(Step("y", "depthwise", ("x",), window=Window((5, 5), (2, 2), (2, 2)), weight="w", groups=21,
           pre="relu"), {"x": (1, 21, 9, 9)}, {"w": randn(21, 1, 5, 5)})
check(Step("y", "maxpool", ("x",), window=Window((3, 3), (2, 2)), ceil=True),
      {"x": (1, 21, 10, 10)}, {})
check(Step("y", "avgpool", ("x",), window=Window((3, 3), padding=(1, 1)), include_pad=False,
           factor=2.0, residual="r"), {"x": (1, 21, 10, 10), "r": (1, 21, 10, 10)}, {})
check(Step("y", "combine", ("x", "z"), factors=(0.5, 2.0), scale="s", shift="t", relu=True),
      {"x": (1, 21, 10, 10), "z": (1, 21, 10, 10)}, {"s": randn(21), "t": randn(21)})
print("all right")
"""


def test_every_kernel_computes_what_its_step_means():
    assert in_interpreter(CASES) == "all right\n"
