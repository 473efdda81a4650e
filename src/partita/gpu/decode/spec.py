"""The sizes of a decoder, and block sizes for its kernels."""

from dataclasses import dataclass, field

from partita.errors import InputError

MOST_SAMPLES = 16  # columns of one matrix instruction
LEAST_CHUNK = 16  # rows of a matrix instruction
KINDS = ("qkv", "out", "gate", "down", "head")
# what the kernels' `activated` computes, by the names that configurations have for it
ACTIVATIONS = {
    "silu": 1, "swish": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "gelu": 3, "relu": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A norm before attention and before the MLP, grouped heads.

    As it stands RMS norms and a gated MLP (Llama, Mistral, Qwen); `centered` norms take off the
    mean and add a shift, and an MLP that is not `gated` has one product before its activation
    (GPT-2). Which products have biases, and whether places are learned, the weights say.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int  # of the MLP
    vocab: int
    length: int  # rows of the cache
    eps: float = 1e-5
    theta: float = 10000.0  # of the rotary embedding
    batch: int = 1  # samples, each with a token at a place of its own
    centered: bool = False  # layer norms
    gated: bool = True  # the MLP: act(gate) * up
    activation: str = "silu"  # of the MLP, one of ACTIVATIONS

    def __post_init__(self) -> None:
        power = self.head_size & (self.head_size - 1) == 0
        if not power or not 16 <= self.head_size <= 256:
            raise InputError(f"heads of {self.head_size}", fix="16, 32, 64, 128 and 256 can be run")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads share {self.kv_heads} key heads",
                fix="give a number of heads that the key heads divide",
            )
        if self.length < 1:
            raise InputError(f"a cache of {self.length} rows", fix="give 1 or more", field="length")
        if not 1 <= self.batch <= MOST_SAMPLES:
            raise InputError(
                f"a batch of {self.batch}", fix=f"1 to {MOST_SAMPLES} can be run", field="batch"
            )

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads

    def sizes(self, kind: str) -> tuple[int, int]:
        """Rows of the result and length of a row of one kind of product."""
        together = (self.heads + 2 * self.kv_heads) * self.head_size
        return {
            "qkv": (together, self.width),
            "out": (self.width, self.heads * self.head_size),
            "gate": (self.hidden, self.width),
            "down": (self.width, self.hidden),
            "head": (self.vocab, self.width),
        }[kind]


@dataclass(frozen=True, slots=True)
class ProductBlock:
    """Rows and columns that a program reads at a time, and its warps.

    With `per_unit` so many programs on each execution unit go through all rows; 0: one program for
    each tile of rows. For several samples `split` programs share the columns of a tile.
    """

    rows: int
    cols: int
    warps: int = 4
    per_unit: int = 0
    split: int = 1


# the best of short runs of `tune.py` on an H200 for Llama-3.2-1B; others may be better for others
BLOCKS = {
    "qkv": ProductBlock(2, 2048, 4, 8), "out": ProductBlock(1, 2048, 4, 8),
    "gate": ProductBlock(8, 1024, 4, 2), "down": ProductBlock(2, 2048, 4),
    "head": ProductBlock(4, 1024, 4),
}  # fmt: skip
BATCHED = {  # of the same model with four samples
    "qkv": ProductBlock(32, 256, split=2), "out": ProductBlock(16, 256, split=4),
    "gate": ProductBlock(32, 256), "down": ProductBlock(64, 128, split=4),
    "head": ProductBlock(64, 128),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the kernels of a step are launched; `batched` is for the products of several samples."""

    blocks: dict[str, ProductBlock] = field(default_factory=lambda: dict(BLOCKS))
    batched: dict[str, ProductBlock] = field(default_factory=lambda: dict(BATCHED))
    stages: int = 4  # of loading ahead, for several samples
    chunk: int = 128  # rows of the cache that a program reads
    attend_warps: int = 4  # of a program that does
    overlap: bool = True  # programmatic dependent launch: the next kernel starts early

    def __post_init__(self) -> None:
        if self.batched["gate"].split > 1:
            raise InputError(
                "the columns of gate are shared out", fix="a gate needs whole sums: give split=1",
                field="batched",
            )  # fmt: skip
        if self.chunk < LEAST_CHUNK or self.chunk & (self.chunk - 1):
            raise InputError(
                f"{self.chunk} rows of the cache at a time", fix="give 16, 32, 64...", field="chunk"
            )
