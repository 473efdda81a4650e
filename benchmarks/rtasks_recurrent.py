"""Recurrent models at batch 1 on a GPU: persistent kernels against a CUDA graph and torch.compile.

Seq2Seq: an encoder of 8 LSTM layers over 100 tokens, a decoder of 4 layers that chooses 30 tokens.
Speech: two convolutions with batch norm and hardtanh on a spectrogram, 5 layers of GRU in two
directions, a linear head (as Deep Speech 2). In ours the recurrent layers and the decoder are
persistent kernels, all else is as in the model; everything is captured in one CUDA graph. The
graph of the model decodes all steps; so does ours, unless "early" is said.

torch.compile (reduce-overhead): PyTorch does not compile recurrent modules unless told to (it
would unroll all steps); so it runs them through cuDNN between compiled pieces. For the decoder the
better way is measured too: one step compiled with its LSTM unrolled, repeated by Python.
"""

import argparse
import copy
import time

import torch
from rtasks_lstm import in_graph, timed
from torch import nn

from partita.gpu.recurrent.decode import Decoded, GreedyDecoder, compile_decoder
from partita.gpu.recurrent.layers import compile_module

T = torch.Tensor
CUDA = torch.device("cuda")


class Seq2Seq(nn.Module):
    """Tokens in, tokens out."""

    def __init__(self, hidden: int, vocabulary: int, encoder: int = 8, decoder: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.LSTM(hidden, hidden, encoder)
        self.decoder = GreedyDecoder(
            nn.Embedding(vocabulary, hidden),
            nn.LSTM(hidden, hidden, decoder),
            nn.Linear(hidden, vocabulary),
            eos=-1,
        )

    def encode(self, tokens: T) -> tuple[T, T]:
        """The states that the decoder starts from."""
        _, (h, c) = self.encoder(self.embedding(tokens).unsqueeze(1))
        count = self.decoder.rnn.num_layers
        return h[-count:], c[-count:]

    def forward(self, tokens: T, first: T, max_steps: int, stop_early: bool = False) -> Decoded:
        """Decode from the last states of the encoder."""
        return self.decoder(*self.encode(tokens), first, max_steps, stop_early)


class OurSeq2Seq:
    """The same, its encoder and decoder as persistent kernels."""

    def __init__(self, model: Seq2Seq) -> None:
        self.embedding = model.embedding
        self.encoder = compile_module(model.encoder, CUDA)
        self.decoder = compile_decoder(model.decoder, CUDA)
        self.count = model.decoder.rnn.num_layers

    def __call__(self, tokens: T, first: T, max_steps: int) -> Decoded:
        """As the model, stopping early."""
        _, h, c = self.encoder(self.embedding(tokens).unsqueeze(1))
        return self.decoder(h[-self.count :], c[-self.count :], first, max_steps)


class Speech(nn.Module):
    """Spectrogram [1, 1, frequencies, frames] in, letters per frame out."""

    def __init__(self, hidden: int, layers: int = 5, letters: int = 29) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.rnn = nn.GRU(32 * 41, hidden, layers, bidirectional=True)
        self.head = nn.Linear(2 * hidden, letters)

    def forward(self, spectrogram: T) -> T:
        """Logits [steps, 1, letters]."""
        return self.head(self.rnn(self.sequence(spectrogram))[0])

    def sequence(self, spectrogram: T) -> T:
        """What the recurrent layers read: [steps, 1, features]."""
        sequence = self.features(spectrogram)
        return sequence.flatten(1, 2).permute(2, 0, 1).contiguous()


def agreed(ours: Decoded, wanted: Decoded) -> str:
    """How many tokens are the same, and how far the last states are apart."""
    same = int((ours.tokens == wanted.tokens).sum())
    error = (ours.h.double() - wanted.h.double()).abs().max().item()
    return f"{same} of {len(ours.tokens)} tokens as in float64, error of h {error:.1e}"


def seq2seq(chosen: argparse.Namespace, dtype: torch.dtype) -> None:
    """A table of one model."""
    torch.manual_seed(0)
    model = Seq2Seq(chosen.hidden, chosen.vocabulary).cuda().to(dtype).eval()
    with torch.no_grad():
        model.decoder.head.weight *= 4  # choices that rounding does not change
    tokens = torch.randint(chosen.vocabulary, (chosen.steps,), device="cuda")
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    exact = copy.deepcopy(model).double()(tokens, first, chosen.decode)
    ours = OurSeq2Seq(model)
    decoded = ours(tokens, first, chosen.decode)
    plain = timed(lambda: model(tokens, first, chosen.decode), 5, 2)
    graphed = timed(in_graph(lambda: model(tokens, first, chosen.decode)), 30, 5)
    print(f"seq2seq {dtype}: eager {plain:.3f} ms, {agreed(model(tokens, first, 30), exact)}")
    print(f"  in a CUDA graph: {graphed:.3f} ms", flush=True)
    compiled = () if chosen.no_compile else compiled_seq2seq(chosen, model, tokens, first)
    mine = timed(in_graph(lambda: ours(tokens, first, chosen.decode)), 50, 10)
    parts = (
        timed(in_graph(lambda: ours.encoder(ours.embedding(tokens).unsqueeze(1))), 30),
        timed(in_graph(lambda: ours.decoder(decoded.h, decoded.c, first, chosen.decode)), 30),
    )
    best = min((graphed, *compiled))
    print(
        f"  ours {mine:.3f} ms (encoder {parts[0]:.3f}, decoder {parts[1]:.3f}), "
        f"{best / mine:.2f}x the better, {agreed(decoded, exact)}"
    )
    print(f"  encoder: {ours.encoder.shape}; {ours.encoder.about()}")
    print(f"  decoder: {ours.decoder.shape}; {ours.decoder.about()}")
    chosen_tokens = decoded.tokens.tolist()
    ours.decoder.eos = max(set(chosen_tokens), key=chosen_tokens.index)  # the last to appear
    steps = int(ours(tokens, first, chosen.decode).num_steps)
    early = timed(in_graph(lambda: ours(tokens, first, chosen.decode)), 30)
    print(f"  ours with an early end of sequence after {steps} steps: {early:.3f} ms", flush=True)


def compiled_seq2seq(
    chosen: argparse.Namespace, model: Seq2Seq, tokens: T, first: T
) -> tuple[float, ...]:
    """torch.compile as a user would: the decoder step by step, the encoder through cuDNN."""
    import torch._dynamo as dynamo

    begin = time.perf_counter()
    dynamo.reset()
    try:
        with dynamo.config.patch(allow_rnn=True):
            step = torch.compile(model.decoder.step, mode="reduce-overhead")

            def run() -> None:
                state = model.encode(tokens)
                token = first.reshape(1, 1)
                for _ in range(chosen.decode):
                    torch.compiler.cudagraph_mark_step_begin()
                    token, state = step(token.clone(), tuple(part.clone() for part in state))

            taken = timed(run, 10, 2)
        print(
            f"  torch.compile of one decoder step, encoder through cuDNN: {taken:.3f} ms "
            f"(compiled in {time.perf_counter() - begin:.0f} s)"
        )
        plain = torch.compile(model.decoder.step)
        with dynamo.config.patch(allow_rnn=True):
            dynamo.reset()

            def whole() -> None:
                state = model.encode(tokens)
                token = first.reshape(1, 1)
                for _ in range(chosen.decode):
                    token, state = plain(token, state)

            both = timed(in_graph(whole), 20, 5)
        print(
            f"  the same without its own graphs, all in one CUDA graph: {both:.3f} ms", flush=True
        )
    except Exception as failure:
        print(f"  torch.compile: {type(failure).__name__} {str(failure)[:300]}", flush=True)
        return ()
    return taken, both


def speech(chosen: argparse.Namespace, dtype: torch.dtype, hidden: int) -> None:
    """A table of one model."""
    torch.manual_seed(0)
    model = Speech(hidden).cuda().to(dtype).eval()
    x = torch.randn(1, 1, 161, chosen.frames, device="cuda", dtype=dtype)
    exact = copy.deepcopy(model).double()(x.double())
    layers = compile_module(model.rnn, CUDA)

    def ours() -> T:
        return model.head(layers(model.sequence(x))[0])

    def error(new_t: T) -> float:
        return (new_t.double() - exact).abs().max().item()

    plain = timed(lambda: model(x), 5, 2)
    graphed = timed(in_graph(lambda: model(x)), 20, 3)
    print(f"speech {hidden} {dtype}: eager {plain:.3f} ms, error {error(model(x)):.1e}")
    print(f"  in a CUDA graph: {graphed:.3f} ms", flush=True)
    taken = graphed
    if not chosen.no_compile:
        begin = time.perf_counter()
        compiled = torch.compile(model, mode="reduce-overhead")
        taken = timed(lambda: compiled(x), 10, 2)
        spent = time.perf_counter() - begin
        print(f"  torch.compile, GRU through cuDNN: {taken:.3f} ms (compiled in {spent:.0f} s)")
    mine = timed(in_graph(ours), 30, 3)
    fixed = model.sequence(x)
    alone = timed(in_graph(lambda: layers(fixed)), 30, 3)
    print(
        f"  ours {mine:.3f} ms (GRU {alone:.3f}), {min(graphed, taken) / mine:.2f}x the better, "
        f"error {error(ours()):.1e}"
    )
    print(f"  {layers.shape}; {layers.about()}", flush=True)


SWEEP = (
    ("LSTM", 64, 1, False, 1), ("LSTM", 128, 2, False, 1), ("LSTM", 256, 4, False, 1),
    ("LSTM", 512, 2, False, 1), ("LSTM", 1024, 1, False, 1), ("LSTM", 256, 1, True, 1),
    ("GRU", 200, 3, False, 1), ("GRU", 1024, 2, False, 1), ("RNN", 512, 2, False, 1),
    ("LSTM", 256, 4, False, 2), ("LSTM", 256, 4, False, 4), ("LSTM", 512, 1, False, 4),
    ("GRU", 256, 2, True, 4),
)  # fmt: skip


def sweep(chosen: argparse.Namespace, dtype: torch.dtype) -> None:
    """A line for each of many sizes: is a persistent kernel ever slower than cuDNN in a graph?"""
    print(f"{dtype}, {chosen.steps} steps: cuDNN in a graph, ours, ratio, largest difference")
    for kind, hidden, layers, both, batch in SWEEP:
        torch.manual_seed(0)
        module = getattr(nn, kind)(hidden, hidden, layers, bidirectional=both).cuda().to(dtype)
        x = torch.randn(chosen.steps, batch, hidden, device="cuda", dtype=dtype)
        ours = compile_module(module.eval(), CUDA, batch=batch)
        apart = (ours(x)[0].float() - module(x)[0].float()).abs().max().item()
        theirs = timed(in_graph(lambda module=module, x=x: module(x)), 9, 3)
        mine = timed(in_graph(lambda ours=ours, x=x: ours(x)), 9, 3)
        two = " both" if both else ""
        print(
            f"  {kind} {layers} x {hidden}{two}, batch {batch}: {theirs:.3f} {mine:.3f} ms "
            f"{theirs / mine:.2f}x {apart:.0e}; {ours.shape}; {ours.about()}",
            flush=True,
        )


def main() -> None:
    """Print a block per model and element type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("seq2seq", "speech", "sweep"))
    parser.add_argument("--hidden", type=int, default=128, help="of Seq2Seq")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--decode", type=int, default=30)
    parser.add_argument("--frames", type=int, default=400, help="of the spectrogram")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--speech-hidden", type=int, nargs="*", default=[512])
    chosen = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, vars(chosen))
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16):
            if chosen.only in (None, "seq2seq"):
                seq2seq(chosen, dtype)
            for hidden in chosen.speech_hidden if chosen.only in (None, "speech") else ():
                speech(chosen, dtype, hidden)
            if chosen.only == "sweep":
                sweep(chosen, dtype)


if __name__ == "__main__":
    main()
