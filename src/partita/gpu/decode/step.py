"""One token of a decoder as five launches a layer, captured as one CUDA graph.

    step = partita.decode_step(model, length=512)     # a decoder on the GPU, with its head
    logits = step(token, position)                    # the cache has a row more
    step.keys, step.values                            # (layer, sample, key head, row, size)

`token` and `position` are numbers, or tensors of integers on the GPU, one for each sample (then
nothing is copied from the host). Logits (sample, token) lie in one buffer that the next step
overwrites; keys and values may be read and written.
"""

from typing import Any

import torch
from torch import nn

from partita.errors import InputError
from partita.gpu.bounds import Reach, check_inside
from partita.gpu.decode.spec import ACTIVATIONS, KINDS, MOST_SAMPLES, DecoderSpec, StepOptions
from partita.gpu.decode.weights import DecoderWeights, NormWeights, ProductWeights, decoder_weights
from partita.gpu.graphs import GraphReplay, capture
from partita.gpu.rtasks.launches import need_triton

T = torch.Tensor
EMBED_BLOCK = 512
JOINED = 8192  # numbers of chunks that are added up at a time


def decode_step(
    model: nn.Module, length: int = 512, options: StepOptions | None = None, *, batch: int = 1
) -> "DecodeStep":
    """One token of each of `batch` samples of a decoder, with a cache of `length` rows.

    One step serves every position up to `length`; samples may be at different ones.
    """
    need_triton()
    weights = decoder_weights(model, length, batch)
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
        spec, device, batch = self.spec, weights.head.device, self.spec.batch
        cache = (spec.layers, batch, spec.kv_heads, spec.length, spec.head_size)
        self.keys = torch.zeros(cache, dtype=weights.head.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, dtype=torch.int64, device=device)
        wide: dict[str, Any] = {"dtype": torch.float32, "device": device}
        read: dict[str, Any] = {"dtype": weights.head.dtype, "device": device}
        self.x, self.middle = (torch.zeros(batch, spec.width, **wide) for _ in range(2))
        self.x_read, self.middle_read = (torch.zeros(batch, spec.width, **read) for _ in range(2))
        self.qkv = torch.zeros(batch, spec.sizes("qkv")[0], **wide)
        self.attended = torch.zeros(batch, spec.heads * spec.head_size, **read)
        self.hidden = torch.zeros(batch, spec.hidden, **read)
        self.logits = torch.zeros(batch, spec.vocab, **wide)
        splits = -(-spec.length // self.options.chunk)
        self.splits = 1 << max(splits - 1, 0).bit_length()
        self.part = torch.zeros(batch * spec.heads * self.splits * spec.head_size, **wide)
        self.stats = torch.zeros(2 * batch * spec.heads * self.splits, **wide)
        self.count = torch.zeros(batch * spec.kv_heads, dtype=torch.int32, device=device)
        shared = [(self.options.batched[kind], spec.sizes(kind)[0]) for kind in KINDS if batch > 1]
        self.shares = torch.zeros(
            max((b.split * batch * rows for b, rows in shared if b.split > 1), default=1), **wide
        )
        self.shares_done = torch.zeros(
            max((-(-rows // b.rows) for b, rows in shared), default=1), dtype=torch.int32,
            device=device,
        )  # fmt: skip
        self.units = execution_units(device)
        check_inside("a step", step_reaches(spec, weights))
        self.overlap = self.options.overlap and device.type == "cuda"
        self.compiling = False
        self.graph: GraphReplay | None = None
        if device.type == "cuda" and run:
            self.graph = capture(self.launch, warm_up=2)

    def __call__(self, token: int | T, position: int | T) -> T:
        """The logits after one more token of each sample: the row `position` of the cache."""
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
        grid = (-(-spec.width // EMBED_BLOCK), spec.batch)
        kernels.embed[grid](
            self.token, weights.embedding, self.position,
            weights.embedding if weights.places is None else weights.places, self.x, self.x_read,
            WIDTH=spec.width, BLOCK=EMBED_BLOCK, VOCAB=spec.vocab, LENGTH=spec.length,
            PLACES=weights.places is not None,
        )  # fmt: skip
        for number, layer in enumerate(weights.layers):
            self.product("qkv", self.x_read, layer.qkv, self.qkv, norm=layer.norm1)
            self.attend(number)
            self.add("out", self.attended, layer.out, self.x, self.middle, self.middle_read)
            self.product("gate", self.middle_read, layer.gate, self.hidden, norm=layer.norm2)
            self.add("down", self.hidden, layer.down, self.middle, self.x, self.x_read)
        head = ProductWeights(weights.head)
        self.product("head", self.x_read, head, self.logits, norm=weights.norm)

    def add(self, kind: str, x: T, by: ProductWeights, residual: T, out: T, copy: T) -> None:
        """A product that is added to what came in; `copy` is what the next product reads."""
        self.product(kind, x, by, out, residual=residual, copy=copy)

    def product(
        self, kind: str, x: T, by: ProductWeights, out: T, norm: NormWeights | None = None,
        residual: T | None = None, copy: T | None = None,
    ) -> None:  # fmt: skip
        """One kind of product of the vector of a token."""
        from partita.gpu.kernels import transformer as kernels

        spec, w = self.spec, by.weight
        rows, length = spec.sizes(kind)
        several = spec.batch > 1
        block = (self.options.batched if several else self.options.blocks)[kind]
        cols = block.cols * 2 // w.element_size() if several else block.cols  # as many bytes ahead
        columns = min(cols, 1 << max(length - 1, 0).bit_length())
        tiles = -(-rows // block.rows)
        grid: tuple[int, ...] = (
            min(tiles, block.per_unit * self.units) if block.per_unit else tiles,
        )
        tensors: tuple[T, ...] = (
            x, x if norm is None else norm.weight,
            x if norm is None or norm.shift is None else norm.shift, w,
            x if by.bias is None else by.bias, out, out if copy is None else copy,
            x if residual is None else residual,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "EPS": spec.eps, "N": rows, "K": length, "NORM": norm is not None,
            "CENTERED": norm is not None and spec.centered, "BIAS": by.bias is not None,
            "ACT": ACTIVATIONS[spec.activation] if kind == "gate" else 0,
            "GATED": kind == "gate" and spec.gated,
            "RESIDUAL": residual is not None, "COPY": copy is not None,
            "PDL": self.overlap, "BN": block.rows, "BK": columns, "num_warps": block.warps,
            **self.launching(),
        }  # fmt: skip
        kernel: Any = kernels.rows_of_batch if several else kernels.rows
        if several:
            grid = (tiles, block.split)
            tensors = (*tensors, self.shares, self.shares_done)
            constants |= {
                "SPLIT": block.split,
                "BATCH": spec.batch, "BB": MOST_SAMPLES, "STAGES": self.options.stages,
                "BK": max(columns, MOST_SAMPLES),
            }  # fmt: skip
        else:
            constants["EACH"] = min(8, columns)
        if self.compiling:
            kernel.warmup(*tensors, grid=grid, **constants)
        else:
            kernel[grid](*tensors, **constants)

    def compile(self, kind: str) -> None:
        """Compile the kernel of one kind of product, and launch nothing."""
        layer = self.weights.layers[0]
        self.compiling = True
        if kind in ("qkv", "gate", "head"):
            w, out = {
                "qkv": (layer.qkv, self.qkv), "gate": (layer.gate, self.hidden),
                "head": (ProductWeights(self.weights.head), self.logits),
            }[kind]  # fmt: skip
            self.product(kind, self.x_read, w, out, norm=layer.norm1)
        else:
            x, w = (self.attended, layer.out) if kind == "out" else (self.hidden, layer.down)
            self.add(kind, x, w, self.x, self.middle, self.middle_read)
        self.compiling = False

    def attend(self, layer: int) -> None:
        """Attention of one layer."""
        from partita.gpu.kernels import transformer as kernels

        spec, weights, chunk = self.spec, self.weights, self.options.chunk
        heads = 1 << (spec.group - 1).bit_length()
        own = weights.layers[layer]
        q_norm, k_norm = own.q_norm, own.k_norm
        kernels.attend[(spec.kv_heads, -(-spec.length // chunk), spec.batch)](
            self.qkv, self.keys[layer], self.values[layer], self.position, weights.cosines,
            weights.sines, weights.cosines if q_norm is None else q_norm,
            weights.cosines if k_norm is None else k_norm, self.part, self.stats, self.count,
            self.attended, SCALE=spec.head_size**-0.5, EPS=spec.eps,
            HEAD_NORM=q_norm is not None, HEADS=spec.heads, GROUP=spec.group,
            GP=max(heads, MOST_SAMPLES), GJ=heads, D=spec.head_size, LENGTH=spec.length,
            SPLITS=self.splits, SB=max(1, min(self.splits, JOINED // (heads * spec.head_size))),
            CHUNK=chunk, PDL=self.overlap, num_warps=self.options.attend_warps, **self.launching(),
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
        Reach("the cosines", spec.length * spec.head_size, weights.cosines.numel()),
        Reach("the cache", spec.batch * spec.kv_heads * spec.length * spec.head_size, 2**31),
    ]
    if weights.places is not None:
        reaches.append(Reach("the places", spec.length * spec.width, weights.places.numel()))
    reaches += _norm_reaches("the last norm", spec, weights.norm)
    for number, layer in enumerate(weights.layers):
        for kind in ("qkv", "out", "gate", "down"):
            rows, length = spec.sizes(kind)
            rows *= 2 if kind == "gate" and spec.gated else 1
            held: ProductWeights = getattr(layer, kind)
            name = f"{kind} of layer {number}"
            reaches.append(Reach(name, rows * length, held.weight.numel()))
            if held.bias is not None:
                reaches.append(Reach(f"the bias of {name}", rows, held.bias.numel()))
        for norm in (layer.norm1, layer.norm2):
            reaches += _norm_reaches(f"a norm of layer {number}", spec, norm)
        reaches += [
            Reach(f"a norm of heads of layer {number}", spec.head_size, norm.numel())
            for norm in (layer.q_norm, layer.k_norm)
            if norm is not None
        ]
    return reaches


def _norm_reaches(name: str, spec: DecoderSpec, norm: NormWeights) -> list[Reach]:
    reaches = [Reach(name, spec.width, norm.weight.numel())]
    if norm.shift is not None:
        reaches.append(Reach(f"the shift of {name}", spec.width, norm.shift.numel()))
    return reaches
