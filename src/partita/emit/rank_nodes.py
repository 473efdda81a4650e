"""Does the node of an exported program say no more than its op in the graph?

A graph has what planning needs, and a node every number of the code: factors, approximations, what
a loss leaves out. Where a node says what its op says, and all else as the op's line assumes it, the
line is exact; else what it says besides is named.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from partita.capture.torch_program import Ref, TorchNode
from partita.graph.record import Call

MEAN_OF_LOSSES = 1  # PyTorch's number for this reduction
# Operators of tensors alone: what is computed is in the kind, or in the shapes.
PLAIN = {
    "linear": "linear",
    **dict.fromkeys(("matmul", "bmm", "mm"), "matmul"),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"), "reshape"),
    **dict.fromkeys(("transpose", "permute", "t"), "transpose"),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), "split"),
}  # the kind of op that each is
FUNCTIONS = frozenset({"relu", "silu", "tanh", "sigmoid", "exp"})
OF_TWO = frozenset({"add", "sub", "mul", "div"})
GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
Arguments = Mapping[str, Any]


def unsaid(call: Call, node: TorchNode) -> str:
    """What a node says that the line of its op does not; nothing if the line is exact."""
    name, given = node.operation, node.arguments
    if PLAIN.get(name) == call.kind and not _others(given):
        return ""
    fn = call.text("fn") if call.kind == "elementwise" else ""
    if name in FUNCTIONS and fn == name:
        return ""
    if name in OF_TWO and call.kind == "elementwise":
        return _of_two(given) or ("" if fn == name else f"computes {fn}")
    check = CHECKS.get(name)
    if check is None or not node.is_operator:
        return f"calls {name}, which no line says exactly"
    return check(call, given)


def told(call: Call, node: TorchNode) -> Call:
    """A call with the numbers of its node that lines write: an epsilon, an approximation."""
    more: dict[str, Any] = {}
    if node.operation == "gelu":
        more["fn"] = GELUS.get(node.arguments["approximate"], "")
    if node.operation in ("layer_norm", "rms_norm") and node.arguments.get("eps") is not None:
        more["eps"] = float(node.arguments["eps"])
    kept = tuple((name, value) for name, value in call.attrs if name not in more)
    attrs = tuple(sorted((*kept, *more.items())))
    return replace(call, attrs=attrs) if more else call


def _others(given: Arguments) -> bool:
    """Is anything a type to compute in?"""
    return given.get("dtype") is not None


def _of_two(given: Arguments) -> str:
    numbers = [v for k, v in given.items() if k in ("self", "other") and not isinstance(v, Ref)]
    if numbers:
        return f"computes with the number {numbers[0]!r}"
    scaled = given.get("alpha", 1) != 1 or given.get("rounding_mode") is not None
    return "scales or rounds what it computes" if scaled else ""


def _gelu(call: Call, given: Arguments) -> str:
    fn = call.text("fn") if call.kind == "elementwise" else ""
    return "" if fn in GELUS.values() else "is another GELU"


def _norm(call: Call, given: Arguments) -> str:
    is_same = call.whole("dims", 1) == len(given["normalized_shape"])
    return "" if is_same and given.get("eps") is not None else "normalises in another way"


def _softmax(call: Call, given: Arguments) -> str:
    is_same = call.kind == "softmax" and given.get("dtype") is None
    return "" if is_same else "computes in another type"


def _embedding(call: Call, given: Arguments) -> str:
    padding = given["padding_idx"]
    if padding is not None and padding >= 0:
        return f"gives row {padding} no gradient"
    return "scales its gradient" if given["scale_grad_by_freq"] or given["sparse"] else ""


def _attention(call: Call, given: Arguments) -> str:
    if given["attn_mask"] is not None or len(call.inputs) > 3:
        return "adds a mask"
    if given["dropout_p"]:
        return "drops scores"
    is_same = given["is_causal"] == call.flag("causal") and given["scale"] == call.attr("scale")
    plain = not any(call.attr(name) for name in ("window", "chunk", "softcap", "sinks"))
    return "" if is_same and plain else "scales or hides scores otherwise"


def _class_loss(call: Call, given: Arguments) -> str:
    plain = given["weight"] is None and not given["label_smoothing"]
    if not plain or given["reduction"] != MEAN_OF_LOSSES:
        return "weighs, smooths or does not average its losses"
    return "" if call.inputs[1] == call.inputs[0][:-1] else "has probabilities as targets"


def _arange(call: Call, given: Arguments) -> str:
    usual = given.get("dtype") is None and given.get("step", 1) == 1
    return "" if usual and isinstance(given.get("end"), int) else "counts in another way"


def ignored_target(node: TorchNode) -> int | None:
    """The target that a loss leaves out; None where the node is no loss over classes."""
    if node.operation != "cross_entropy_loss":
        return None
    return int(node.arguments["ignore_index"])


def numbers_of(node: TorchNode) -> str:
    """The call that gives a constant's numbers."""
    start = node.arguments.get("start", 0)
    begin = f"{start}, " if start else ""
    return f"torch.arange({begin}{node.arguments['end']}"


CHECKS: dict[str, Callable[[Call, Arguments], str]] = {
    "gelu": _gelu,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "softmax": _softmax,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _class_loss,
    "arange": _arange,
}  # by what the node calls
