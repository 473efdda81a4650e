"""The LLaMA family and Mixtral, of their published sizes (`decoder.py` builds them).

LLaMA: Touvron et al., 2023 (arXiv:2302.13971), table 2. Llama 2: arXiv:2307.09288. Llama 3:
arXiv:2407.21783, table 3. Mixtral: Jiang et al., 2024 (arXiv:2401.04088), table 1; 8x22B from its
published configuration. Module names as in Hugging Face's implementations. Other families are read
from their configurations (`hf.py`).
"""

from dataclasses import replace

from partita.graph.record import Graph
from partita.zoo.decoder import DecoderSizes, Experts, Norm, Rope, decoder
from partita.zoo.parts import sizes_of

_LLAMA_1 = DecoderSizes(32, 4096, 11008, 32, norm=Norm(eps=1e-6))
_LLAMA_3 = DecoderSizes(32, 4096, 14336, 32, 8, vocab=128256, rope=Rope(500000.0))
_MIXTRAL = DecoderSizes(32, 4096, 14336, 32, 8, rope=Rope(1000000.0), experts=Experts(8, 2, 14336))
LLAMA = {
    "7b": _LLAMA_1,
    "13b": replace(_LLAMA_1, layers=40, width=5120, inner=13824, heads=40),
    "33b": replace(_LLAMA_1, layers=60, width=6656, inner=17920, heads=52),
    "65b": replace(_LLAMA_1, layers=80, width=8192, inner=22016, heads=64),
    "2-7b": DecoderSizes(32, 4096, 11008, 32),
    "2-13b": DecoderSizes(40, 5120, 13824, 40),
    "2-70b": DecoderSizes(80, 8192, 28672, 64, 8),
    "3-8b": _LLAMA_3,
    "3-70b": replace(_LLAMA_3, layers=80, width=8192, inner=28672, heads=64),
    "3-405b": replace(_LLAMA_3, layers=126, width=16384, inner=53248, heads=128),
}
MIXTRAL = {
    "8x7b": _MIXTRAL,
    "8x22b": replace(
        _MIXTRAL, layers=56, width=6144, inner=16384, heads=48, experts=Experts(8, 2, 16384)
    ),
}


def llama(
    variant: str = "7b", batch: int = 1, seq: int = 2048, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """LLaMA 1, 2 or 3 of one of its sizes."""
    return decoder(
        f"llama-{variant}",
        sizes_of("llama", variant, LLAMA),
        batch,
        seq,
        dtype,
        loss,
        fused_attention,
        cache,
    )


def mixtral(
    variant: str = "8x7b", batch: int = 1, seq: int = 4096, dtype: str = "bf16",
    loss: bool = True, fused_attention: bool = True, cache: int = 0,
) -> Graph:  # fmt: skip
    """Mixtral 8x7B or 8x22B: each token visits 2 of 8 experts."""
    return decoder(
        f"mixtral-{variant}",
        sizes_of("mixtral", variant, MIXTRAL),
        batch,
        seq,
        dtype,
        loss,
        fused_attention,
        cache,
    )
