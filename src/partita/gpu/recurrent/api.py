"""`partita.persistent`: recurrent layers, or a greedy decoder over some, as one persistent kernel.

    run = partita.persistent(nn.LSTM(256, 256, 10).cuda())
    output, h, c = run(x, h0, c0)                 any length; c is None but for an LSTM

    decoder = partita.GreedyDecoder(embedding, lstm, head, eos=1)
    tokens, num_steps, h, c = partita.persistent(decoder)(h0, c0, first_token, max_steps=30)

What the programs of the kernel wait for and signal is proven safe for some steps before it is
handed out (`check_rprogram`); every step is alike, so that carries over to any number of them.
"""

from typing import overload

import torch
from torch import nn

from partita.errors import InputError, VerificationError
from partita.gpu.recurrent.decode import GreedyDecoder, PersistentDecoder, compile_decoder
from partita.gpu.recurrent.layers import Persistent, compile_module
from partita.gpu.rtasks.launches import need_triton
from partita.problems.rprogram import check_rprogram

PROVEN_STEPS = 3  # the first, one with all waits, one after it


@overload
def persistent(
    module: nn.RNNBase, *, batch: int = 1, device: str | torch.device | None = None
) -> Persistent: ...


@overload
def persistent(
    module: GreedyDecoder, *, batch: int = 1, device: str | torch.device | None = None
) -> PersistentDecoder: ...


def persistent(
    module: nn.RNNBase | GreedyDecoder,
    *,
    batch: int = 1,
    device: str | torch.device | None = None,
) -> Persistent | PersistentDecoder:
    """An `nn.LSTM`, `nn.GRU`, `nn.RNN` or `GreedyDecoder` as a callable that launches one kernel.

    `batch` is that of the calls, up to four; a decoder takes one sequence. `device` is where the
    module's weights are unless given. What has no persistent form is refused with the reason.
    """
    if not isinstance(module, nn.RNNBase | GreedyDecoder):
        raise InputError(
            f"{type(module).__name__} has no persistent form",
            fix="give an nn.LSTM, nn.GRU, nn.RNN or partita.GreedyDecoder; "
            "partita.rtasks takes any module",
        )
    need_triton()
    where = torch.device(device) if device is not None else next(module.parameters()).device
    layers: Persistent | PersistentDecoder
    if isinstance(module, GreedyDecoder):
        if batch != 1:
            raise InputError(
                f"a batch of {batch}", fix="a decoder takes one sequence at a time", field="batch"
            )
        layers = compile_decoder(module, where)
    else:
        layers = compile_module(module, where, batch=batch)
    problem, program = layers.rprogram(PROVEN_STEPS * batch)
    wrong = check_rprogram(problem, program, len(program.veus))
    if wrong:
        raise VerificationError(wrong)
    return layers
