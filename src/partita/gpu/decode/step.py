"""One token of a decoder as five launches a layer, captured as one CUDA graph.

    step = partita.decode_step(model, length=512)     # a LlamaForCausalLM on the GPU
    logits = step(token, position)                    # the cache has a row more
    step.keys, step.values                            # (layer, key head, row, size): read and write

`token` and `position` are numbers, or tensors of one integer on the GPU (then nothing is copied
from the host). Logits lie in one buffer that the next step overwrites.
"""

from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.bounds import Reach, check_inside
from partita.gpu.decode.spec import DecoderSpec, StepOptions
from partita.gpu.decode.weights import DecoderWeights, decoder_weights
from partita.gpu.graphs import GraphReplay, capture
from partita.gpu.rtasks.launches import need_triton

T = torch.Tensor
EMBED_BLOCK = 512


def decode_step(
    model: nn.Module, length: int = 512, options: StepOptions | None = None
) -> "DecodeStep":
    """One token of a Llama-like model with a cache of `length` rows, ready to call."""
    need_triton()
    weights = decoder_weights(model, length)
    if weights.head.device.type != "cuda":
        raise InputError(
            f"the model is on {weights.head.device}", fix="put it on the GPU: model.cuda()"
        )
    return DecodeStep(weights, options)


class DecodeStep:
    """Buffers, cache and launches of one token."""

    def __init__(
        self, weights: DecoderWeights, options: StepOptions | None = None, *, run: bool = True
    ) -> None:
        self.weights, self.spec = weights, weights.spec
        self.options = options or StepOptions()
        spec, device = self.spec, weights.head.device
        cache = (spec.layers, spec.kv_heads, spec.length, spec.head_size)
        self.keys = torch.zeros(cache, dtype=weights.head.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        wide: dict[str, Any] = {"dtype": torch.float32, "device": device}
        read: dict[str, Any] = {"dtype": weights.head.dtype, "device": device}
        self.x, self.middle = (torch.zeros(spec.width, **wide) for _ in range(2))
        self.x_read, self.middle_read = (torch.zeros(spec.width, **read) for _ in range(2))
        self.qkv = torch.zeros(spec.sizes("qkv")[0], **wide)
        self.attended = torch.zeros(spec.heads * spec.head_size, **read)
        self.hidden = torch.zeros(spec.hidden, **read)
        self.logits = torch.zeros(1, spec.vocab, **wide)
        splits = -(-spec.length // self.options.chunk)
        self.splits = 1 << max(splits - 1, 0).bit_length()
        self.part = torch.zeros(spec.heads * self.splits * spec.head_size, **wide)
        self.stats = torch.zeros(2 * spec.heads * self.splits, **wide)
        self.count = torch.zeros(spec.kv_heads, dtype=torch.int32, device=device)
        self.units = execution_units(device)
        check_inside("a step", step_reaches(spec, weights))
        self.overlap = self.options.overlap and device.type == "cuda"
        self.compiling = False
        self.graph: GraphReplay | None = None
        if device.type == "cuda" and run:
            self.graph = capture(self.launch, warm_up=2)

    def __call__(self, token: int | T, position: int | T) -> T:
        """The logits after one more token, which is the row `position` of the cache."""
        if not isinstance(position, T) and not 0 <= position < self.spec.length:
            raise InputError(
                f"position {position}", fix=f"the cache has {self.spec.length} rows, from 0"
            )
        for place, value in ((self.token, token), (self.position, position)):
            if isinstance(value, T):
                place.copy_(value)
            else:
                place.fill_(value)
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        return self.logits

    def launch(self) -> None:
        """Everything once, on the current stream."""
        from partita.gpu.kernels import transformer as kernels

        spec, weights = self.spec, self.weights
        grid = (-(-spec.width // EMBED_BLOCK),)
        kernels.embed[grid](
            self.token, weights.embedding, self.x, self.x_read, WIDTH=spec.width,
            BLOCK=EMBED_BLOCK, VOCAB=spec.vocab,
        )  # fmt: skip
        for number, layer in enumerate(weights.layers):
            self.product("qkv", self.x_read, layer.qkv, self.qkv, norm=layer.norm1)
            self.attend(number)
            self.add("out", self.attended, layer.out, self.x, self.middle, self.middle_read)
            self.product("gate", self.middle_read, layer.gate, self.hidden, norm=layer.norm2)
            self.add("down", self.hidden, layer.down, self.middle, self.x, self.x_read)
        self.product("head", self.x_read, weights.head, self.logits, norm=weights.norm)

    def add(self, kind: str, x: T, w: T, residual: T, out: T, copy: T) -> None:
        """A product that is added to what came in; `copy` is what the next product reads."""
        self.product(kind, x, w, out, residual=residual, copy=copy)

    def product(
        self, kind: str, x: T, w: T, out: T, norm: T | None = None, residual: T | None = None,
        copy: T | None = None,
    ) -> None:  # fmt: skip
        """One kind of product of the vector of a token."""
        from partita.gpu.kernels import transformer as kernels

        rows, length = self.spec.sizes(kind)
        block = self.options.blocks[kind]
        columns = min(block.cols, 1 << max(length - 1, 0).bit_length())
        tiles = -(-rows // block.rows)
        grid = (min(tiles, block.per_unit * self.units) if block.per_unit else tiles,)
        tensors = (
            x, x if norm is None else norm, w, out, out if copy is None else copy,
            x if residual is None else residual,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "EPS": self.spec.eps, "N": rows, "K": length, "NORM": norm is not None,
            "GATED": kind == "gate", "RESIDUAL": residual is not None, "COPY": copy is not None,
            "PDL": self.overlap, "BN": block.rows, "BK": columns, "EACH": min(8, columns), "num_warps": block.warps,
            **self.launching(),
        }  # fmt: skip
        if self.compiling:
            kernels.rows.warmup(*tensors, grid=grid, **constants)
        else:
            kernels.rows[grid](*tensors, **constants)

    def compile(self, kind: str) -> None:
        """Compile the kernel of one kind of product, and launch nothing."""
        layer = self.weights.layers[0]
        self.compiling = True
        if kind in ("qkv", "gate", "head"):
            w, out = {
                "qkv": (layer.qkv, self.qkv), "gate": (layer.gate, self.hidden),
                "head": (self.weights.head, self.logits),
            }[kind]  # fmt: skip
            self.product(kind, self.x_read, w, out, norm=layer.norm1)
        else:
            x, w = (self.attended, layer.out) if kind == "out" else (self.hidden, layer.down)
            self.add(kind, x, w, self.x, self.middle, self.middle_read)
        self.compiling = False

    def attend(self, layer: int) -> None:
        """Attention of one layer."""
        from partita.gpu.kernels import transformer as kernels

        spec, weights = self.spec, self.weights
        kernels.attend[(spec.kv_heads, -(-spec.length // self.options.chunk))](
            self.qkv, self.keys[layer], self.values[layer], self.position, weights.cosines,
            weights.sines, self.part, self.stats, self.count, self.attended,
            SCALE=spec.head_size**-0.5, HEADS=spec.heads, GROUP=spec.group, D=spec.head_size,
            LENGTH=spec.length, SPLITS=self.splits, CHUNK=self.options.chunk, PDL=self.overlap,
            num_warps=4, **self.launching(),
        )  # fmt: skip

    def launching(self) -> dict[str, bool]:
        """Options of a launch that Triton's interpreter does not know."""
        return {"launch_pdl": True} if self.overlap else {}


def execution_units(device: torch.device) -> int:
    """How many programs run side by side at the least; without a GPU some number for tests."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def step_reaches(spec: DecoderSpec, weights: DecoderWeights) -> list[Reach]:
    """What the kernels may touch of weights: masks keep them inside the sizes of the spec."""
    reaches = [
        Reach("the embedding", spec.vocab * spec.width, weights.embedding.numel()),
        Reach("the head", spec.vocab * spec.width, weights.head.numel()),
        Reach("the last norm", spec.width, weights.norm.numel()),
        Reach("the cosines", spec.length * spec.head_size, weights.cosines.numel()),
        Reach("the cache", spec.kv_heads * spec.length * spec.head_size, 2**31),
    ]
    for number, layer in enumerate(weights.layers):
        for kind in ("qkv", "out", "gate", "down"):
            rows, length = spec.sizes(kind)
            rows *= 2 if kind == "gate" else 1
            held: T = getattr(layer, kind)
            reaches.append(Reach(f"{kind} of layer {number}", rows * length, held.numel()))
        reaches += [
            Reach(f"a norm of layer {number}", spec.width, norm.numel())
            for norm in (layer.norm1, layer.norm2)
        ]
    return reaches
