"""The Transformer that a user names: an entry of the zoo, a Hugging Face config.json, a known name.

Parameters and forward FLOPs are those of the zoo's graph. Some published configurations are known
by name. What is not a stack of equal layers (T5 with its two stacks, networks of convolutions,
saved graphs) is refused: an op-by-op simulation takes any graph.
"""

from typing import Any

from partita.capture.onnx_file import is_onnx_spec
from partita.capture.python_file import is_python_spec
from partita.errors import InputError, ModelError
from partita.forecast.inputs import ExpertLayers, Latent, Transformer
from partita.suggest import suggest
from partita.zoo.bert import BERT, BertSizes
from partita.zoo.catalogue import MODELS
from partita.zoo.decoder import DecoderSizes
from partita.zoo.gpt import GPT2, GPT3, GptSizes
from partita.zoo.hf import FAMILIES, Sizes, read_config
from partita.zoo.llama import LLAMA, MIXTRAL
from partita.zoo.mamba import MambaSizes
from partita.zoo.model import ZooModel
from partita.zoo.spec import named
from partita.zoo.t5 import T5Sizes
from partita.zoo.towers import ClipSizes, Seq2SeqSizes, VitClassifier
from partita.zoo.vit import VIT, VitSizes

# The builders of the zoo that make a stack of equal layers, and the sizes of their variants.
STACKS: dict[str, dict[str, Any]] = {
    "gpt:gpt2": GPT2,
    "gpt:gpt3": GPT3,
    "llama:llama": LLAMA,
    "llama:mixtral": MIXTRAL,
    "bert:bert": BERT,
    "vit:vit": VIT,
}
NOT_STACKS = {
    "t5",
    "bart",
    "whisper",
    "vit",
    "clip",
    "clip_text_model",
    "clip_vision_model",
    "mamba2",
}  # families with two stacks, of images, or without attention
CLASSES = 1000  # of the vision transformers of the zoo
CHANNELS = 3

_DEEPSEEK = {
    "model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip
# Published configurations of models that have no graph in the zoo.
KNOWN: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **_DEEPSEEK, "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "q_lora_rank": None, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2": {
        **_DEEPSEEK, "num_hidden_layers": 60, "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    },
    "deepseek-v3": {
        **_DEEPSEEK, "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "intermediate_size": 6144, "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": {
        **_QWEN3, "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
        "intermediate_size": 12288, "moe_intermediate_size": 1536,
    },
}  # fmt: skip


def transformer_names() -> tuple[str, ...]:
    """The names that can be forecast; configurations of the families come on top."""
    return (*(name for name, model in MODELS.items() if model.builder in STACKS), *KNOWN)


def transformer_of(spec: str) -> Transformer:
    """The transformer that `spec` names: `gpt3-175b`, `llama-3-8b@32768`, `config.json@8192`."""
    if is_python_spec(spec) or is_onnx_spec(spec):
        raise _refused(spec, "is a model of your own, whose layers are not known by name")
    plain, _, value = spec.partition("@")
    known = KNOWN.get(plain.lower().replace("_", "-"))
    if known is not None:
        if value and not (value.isascii() and value.isdecimal() and 0 < int(value[:12]) < 2**31):
            raise ModelError(f"seq {value[:60]!r} after the @", fix="give a number", field=spec)
        return from_config(known, plain.lower(), int(value) if value else None)
    try:
        entry = named(spec)
    except ModelError as error:
        raise _with_known(error, plain) from None
    if entry.config is not None:
        try:
            return from_config(entry.config, entry.name, entry.value)
        except InputError as error:
            file = spec.partition("@")[0]
            raise ModelError(error.found, fix=error.fix, field=error.field, file=file) from None
    assert entry.model is not None
    if entry.model.builder not in STACKS:
        raise _refused(spec, "is not a stack of equal transformer layers")
    return _of_entry(entry.model, entry.value or entry.model.default)


def _refused(spec: str, why: str) -> ModelError:
    return ModelError(
        why,
        fix=f"strategies by name are for {', '.join(_kinds())} and config.json of "
        f"{', '.join(_families())}; `partita plan`, and `partita simulate` without a strategy, "
        "take any graph",
        field=spec,
    )


def _kinds() -> list[str]:
    """The families of the zoo by the beginning of their names."""
    return ["gpt2*", "gpt3-*", "llama-*", "mixtral-*", "bert-*", "vit-*", *KNOWN]


def _families() -> list[str]:
    """The families whose configurations are read; T5 has two stacks."""
    return sorted({*FAMILIES} - NOT_STACKS)


def _with_known(error: ModelError, name: str) -> ModelError:
    """A misspelt name may mean one that only forecasts know."""
    if error.file or "no model" not in error.found:
        is_graph = bool(error.file) and "is a graph" in error.found
        return _refused(error.file, error.found) if is_graph else error
    near = suggest(name, transformer_names())
    return ModelError(error.found, fix=f"{near} (partita models lists those of the zoo)")


def _of_entry(model: ZooModel, value: int) -> Transformer:
    sizes = STACKS[model.builder][str(dict(model.preset)["variant"])]
    if isinstance(sizes, VitSizes):
        return _vit(model.name, sizes, value)
    return from_sizes(model.name, sizes, value)


def from_sizes(name: str, sizes: GptSizes | Sizes, seq: int) -> Transformer:
    """The transformer of the zoo's sizes at a sequence length."""
    if isinstance(sizes, T5Sizes | Seq2SeqSizes):
        raise _refused(name, "has an encoder and a decoder, not one stack of equal layers")
    if isinstance(sizes, ClipSizes):
        raise _refused(name, "has towers for texts and images, not one stack of equal layers")
    if isinstance(sizes, MambaSizes):
        raise _refused(name, "has state spaces in place of attention")
    if isinstance(sizes, VitClassifier):
        raise _refused(name, "is a configuration of images, whose names here are vit-*")
    if isinstance(sizes, DecoderSizes) and not sizes.positions:
        return _decoder(name, sizes, seq)
    if seq > sizes.positions:
        raise ModelError(
            f"{seq} positions, and the model has learned {sizes.positions}",
            fix=f"choose at most {sizes.positions}",
            field=name,
        )
    if isinstance(sizes, DecoderSizes):
        return _decoder(name, sizes, seq)
    encoder = isinstance(sizes, BertSizes)
    return Transformer(
        name, sizes.layers, sizes.width, sizes.heads, sizes.inner or 4 * sizes.width, sizes.vocab,
        seq, tied=sizes.tied, causal=not encoder, num_positions=sizes.positions, transform=encoder,
    )  # fmt: skip


def _decoder(name: str, sizes: DecoderSizes, seq: int) -> Transformer:
    # Attention within chunks sees half a chunk on average, as a window of half of it would.
    windows = [window for window in sizes.windows if window]
    windows += [max(1, chunk // 2) for chunk in sizes.chunks if 0 < chunk < seq]
    latent = None
    if sizes.latent is not None:
        of = sizes.latent
        latent = Latent(of.query_rank, of.key_rank, of.rope, of.nope, of.value)
    experts = None
    if sizes.experts is not None:
        given = sizes.experts
        experts = ExpertLayers(
            given.count, given.top_k, given.inner, given.shared, len(sizes.dense_layers)
        )
    return Transformer(
        name, sizes.layers, sizes.width, sizes.heads, sizes.dense_inner or sizes.inner,
        sizes.vocab, seq, kv_heads=sizes.kv_heads, head_size=sizes.head_size, gated=sizes.gated,
        biases=sizes.mlp_bias, tied=sizes.tied, positions=bool(sizes.positions), experts=experts,
        num_positions=sizes.positions + sizes.position_offset, latent=latent,
        window=max(windows, default=0), windowed_share=len(windows) / sizes.layers,
    )  # fmt: skip


def _vit(name: str, sizes: VitSizes, size: int) -> Transformer:
    if size % sizes.patch:
        raise ModelError(
            f"size {size}, which patches of {sizes.patch} do not divide",
            fix=f"choose a multiple of {sizes.patch}",
            field=name,
        )
    return Transformer(
        name, sizes.layers, sizes.width, sizes.heads, sizes.inner, CLASSES,
        (size // sizes.patch) ** 2 + 1, tied=False, causal=False,
        patch_features=CHANNELS * sizes.patch**2, classifies=True,
    )  # fmt: skip


def from_config(config: dict[str, Any], name: str = "", seq: int | None = None) -> Transformer:
    """The transformer of a Hugging Face configuration."""
    sizes, length = read_config(config, seq)
    return from_sizes(name or str(config["model_type"]), sizes, length)
