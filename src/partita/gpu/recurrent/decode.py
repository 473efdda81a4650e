"""Greedy decoding as one persistent kernel that stops at the end of sequence.

    decoder = GreedyDecoder(nn.Embedding(v, e), nn.LSTM(e, h, 4), nn.Linear(h, v), eos=1)
    run = compile_decoder(decoder, device)
    tokens, num_steps, h, c = run(h0, c0, first_token, max_steps=30)

The module is the original to be equal to; `run` is called the same way, with any `max_steps`. Its
number of steps is a tensor on the device: nothing waits for it, so a call can be captured in a CUDA
graph (once a call of the same `max_steps` was made) and still stops early when replayed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.errors import ProblemError
from partita.gpu.recurrent.decode_spec import DecoderShape, decoder_refusal, decoder_shapes
from partita.gpu.recurrent.layers import aligned, num_units, spec_of
from partita.gpu.recurrent.pack import biases, padded
from partita.gpu.recurrent.program import decoder_rprogram
from partita.gpu.recurrent.spec import KINDS, Recurrent, power
from partita.gpu.residency import check_resident, resident_programs, resources
from partita.problems.rprogram import RProgram
from partita.problems.rtasks import RtasksProblem

T = torch.Tensor


class Decoded(NamedTuple):
    """The tokens, filled up with the end of sequence; how many steps were made; the last states."""

    tokens: T  # [max_steps]
    num_steps: T  # a whole number on the device
    h: T
    c: T | None


class GreedyDecoder(nn.Module):
    """Token, embedding, recurrent layers, linear head, the largest logit: the next token."""

    def __init__(
        self, embedding: nn.Embedding, rnn: nn.LSTM | nn.GRU | nn.RNN, head: nn.Linear, eos: int
    ) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head, self.eos = embedding, rnn, head, eos

    def step(self, token: T, state: Any) -> tuple[T, Any]:
        """One token further: token [1, 1]."""
        embedded = self.embedding(token)
        output, state = self.rnn(embedded, state)
        return self.head(output).argmax(-1), state

    def forward(
        self, h: T, c: T | None, first_token: T, max_steps: int, stop_early: bool = True
    ) -> Decoded:
        """Decode until the end of sequence is chosen, or `max_steps` tokens are."""
        tokens = torch.full((max_steps,), self.eos, device=h.device)
        token = first_token.reshape(1, 1)
        state: Any = h if c is None else (h, c)
        steps = 0
        while steps < max_steps:
            token, state = self.step(token, state)
            tokens[steps] = token.reshape(())
            steps += 1
            if stop_early and int(token) == self.eos:
                break
        h, c = (state, None) if c is None else state
        return Decoded(tokens, torch.tensor(steps, dtype=torch.int32), h, c)


@dataclass(frozen=True, slots=True)
class _DecodeScratch:
    hidden: T
    best: T
    index: T
    capacity: int


class PersistentDecoder:
    """The compiled decoder."""

    def __init__(
        self,
        module: GreedyDecoder,
        spec: Recurrent,
        device: torch.device,
        shape: DecoderShape,
        delay_ns: int = 0,
    ) -> None:
        self.spec, self.device, self.shape, self.delay_ns = spec, device, shape, delay_ns
        self.eos, self.vocabulary = module.eos, module.head.out_features
        self.spins = device.type == "cuda"
        self.num_blocks = -(spec.hidden_size // -shape.rows)
        self.width = power(spec.hidden_size)
        self._take(module)
        self._counters = self._zeros(spec.num_layers + 3, dtype=torch.int32)
        self._faults = self._zeros(1, dtype=torch.int32)
        self._carry = self._zeros(spec.num_layers, spec.hidden_size, dtype=torch.float32)
        self._scratch: dict[int, _DecodeScratch] = {}
        self._compiled: Any = None
        self.turns: T | None = None  # for the interpreter: another order

    def _zeros(self, *size: int, dtype: torch.dtype) -> T:
        return torch.zeros(*size, dtype=dtype, device=self.device)

    def _take(self, module: GreedyDecoder) -> None:
        """Weights as the kernel takes them; the first layer's input weights go into the table."""
        spec = self.spec
        each = 4 if spec.bias else 2
        flat = [weight.detach() for weight in module.rnn._flat_weights if weight is not None]
        layers = [flat[at : at + each] for at in range(0, len(flat), each)]
        embedded = module.embedding.weight.detach().float() @ layers[0][0].float().t()
        self.table = embedded.contiguous().to(self.device)
        blank = torch.zeros_like(layers[0][1])
        given = [blank, *(layer[0] for layer in layers[1:])]
        self.w_x = torch.stack([padded(weight, self.width) for weight in given]).to(self.device)
        past = [padded(layer[1], self.width) for layer in layers]
        self.w_h = torch.stack(past).to(self.device)
        self.bias = torch.stack([biases(spec, layer[2:]) for layer in layers]).to(self.device)
        self.w_out = padded(module.head.weight.detach(), self.width).to(self.device)
        bias = module.head.bias
        self.b_out = self._zeros(self.vocabulary, dtype=torch.float32)
        if bias is not None:
            self.b_out.copy_(bias.detach())

    def __call__(self, h: T, c: T | None, first_token: T, max_steps: int) -> Decoded:
        """As the module; `max_steps` may differ from call to call."""
        self._check(h, c, max_steps)
        tokens = torch.empty(max_steps, dtype=torch.int64, device=self.device)
        steps = torch.empty((), dtype=torch.int32, device=self.device)
        h_last = torch.empty_like(h)
        c_last = None if c is None else torch.empty_like(c)
        self._launch(h, c, first_token, max_steps, tokens, steps, h_last, c_last)
        return Decoded(tokens, steps, h_last, c_last)

    def _check(self, h: T, c: T | None, max_steps: int) -> None:
        spec = self.spec
        wanted = (spec.num_layers, 1, spec.hidden_size)
        for name, state, needed in (("h", h, True), ("c", c, spec.cell == "lstm")):
            if (state is not None) != needed or (
                state is not None and (tuple(state.shape) != wanted or state.dtype != spec.dtype)
            ):
                given = None if state is None else (tuple(state.shape), state.dtype)
                raise ProblemError(
                    f"{name} is {given}", fix=f"give {(wanted, spec.dtype) if needed else None}"
                )
        if max_steps < 1:
            raise ProblemError(f"max_steps is {max_steps}", fix="give 1 or more")

    def _scratch_for(self, max_steps: int) -> _DecodeScratch:
        capacity = max(power(max_steps), 16)
        if capacity not in self._scratch:
            wide = power(self.shape.num_programs)
            layers = self.spec.num_layers
            self._scratch[capacity] = _DecodeScratch(
                self._zeros(layers, capacity, self.width, dtype=self.spec.dtype),
                self._zeros(capacity, wide, dtype=torch.float32),
                self._zeros(capacity, wide, dtype=torch.int32),
                capacity,
            )
        return self._scratch[capacity]

    def _launch(
        self,
        h: T,
        c: T | None,
        first_token: T,
        max_steps: int,
        tokens: T,
        steps: T,
        h_last: T,
        c_last: T | None,
    ) -> None:
        from partita.gpu.kernels.decode import greedy_decode

        spec, shape, scratch = self.spec, self.shape, self._scratch_for(max_steps)
        cells = spec.num_layers * self.num_blocks
        turns = self._counters
        if not self.spins:
            count = max_steps * (cells + shape.num_programs)
            turns = torch.arange(count, dtype=torch.int32) if self.turns is None else self.turns
        h, first_token = aligned(h), aligned(first_token)
        arguments = (
            first_token, self.table, self.w_x, self.w_h, self.bias, self.w_out, self.b_out, h,
            h if c is None else aligned(c), scratch.hidden, self._carry, scratch.best,
            scratch.index, tokens, steps, h_last, h_last if c_last is None else c_last,
            self._counters, self._faults, turns,
            max_steps, scratch.capacity, self.eos, turns.shape[0],
            KINDS.index(spec.cell), spec.slots, spec.gates, spec.hidden_size, self.width,
            self.vocabulary, spec.num_layers, self.num_blocks, shape.num_programs,
            power(shape.num_programs), shape.rows, shape.head_rows, shape.chunks,
            shape.cells_resident, shape.head_resident, self.spins, self.delay_ns,
        )  # fmt: skip
        options: dict[str, Any] = {"num_warps": shape.num_warps}
        options["grid"] = (shape.num_programs if self.spins else 1,)
        if self.spins and self._compiled is None:
            compiled = greedy_decode.warmup(*arguments, **options)
            compiled._init_handles()
            resident = resident_programs(compiled, shape.num_warps, self.device)
            check_resident(shape.num_programs, resident, resources(compiled))
            self._compiled = compiled
        greedy_decode.run(*arguments, warmup=False, **options)

    @property
    def faults(self) -> int:
        """How many waits came too early in the interpreter."""
        return int(self._faults.item())

    def about(self) -> str:
        """The resources of the compiled kernel."""
        if self._compiled is None:
            return "not compiled"
        return f"{self.shape.num_programs} programs, {resources(self._compiled)}"

    def rprogram(self, num_steps: int) -> tuple[RtasksProblem, RProgram]:
        """What the programs wait for and signal in some steps, and what they need."""
        return decoder_rprogram(
            self.spec.num_layers, self.num_blocks, num_steps, self.shape.num_programs
        )


def compile_decoder(
    module: GreedyDecoder,
    device: torch.device,
    shape: DecoderShape | None = None,
    delay_ns: int = 0,
) -> PersistentDecoder:
    """The decoder as a callable, by the most promising shape unless one is given."""
    spec, vocabulary = spec_of(module.rnn), module.head.out_features
    refusal = decoder_refusal(spec, vocabulary, num_units(device))
    if module.embedding.num_embeddings < vocabulary:
        refusal = (
            f"a head over {vocabulary} tokens, an embedding of {module.embedding.num_embeddings}"
        )
    if refusal is not None:
        raise ProblemError(refusal, fix="run this decoder as it is")
    if shape is None:
        shape = decoder_shapes(spec, vocabulary, num_units(device))[0]
    return PersistentDecoder(module, spec, device, shape, delay_ns)
