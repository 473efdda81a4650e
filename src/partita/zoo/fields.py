"""The fields of a configuration, each checked as it is asked for, and none forgotten.

A family says which fields it reads, with their defaults, and which are known to change nothing.
What stands in a configuration and is in neither list is refused by name: a graph that ignored it
would be another model. A field that is null is not there.
"""

import json
from typing import Any

from partita.errors import ModelError
from partita.suggest import suggest

MAX_SIZE = 2**31
MAX_LAYERS = 1024
# What `transformers` names functions, and what they are here; others are refused.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu",
    "tanh": "tanh", "sigmoid": "sigmoid", "linear": "",
}  # fmt: skip
# Fields of every family that change neither shapes nor numbers of one forward pass: names and
# versions, ids of tokens, how text is generated, how training starts, dropout (graphs have none).
NEUTRAL = frozenset({
    "architectures", "_name_or_path", "transformers_version", "auto_map", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "finetuning_task", "task_specific_params",
    "tokenizer_class", "prefix", "problem_type", "id2label", "label2id", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "use_cache",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "is_encoder_decoder", "initializer_range", "initializer_factor", "init_std", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "unk_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "cache_implementation", "max_length", "max_new_tokens", "min_length",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "output_past",
    "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "dropout", "activation_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout_rate", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha",
    "seq_aux",
})  # fmt: skip
COMMON = ("model_type", "dtype", "torch_dtype")  # read for all families alike
# Fields of every family that must have one value, and what to do where they have another.
FIXED: dict[str, tuple[object, str]] = {
    "quantization_config": (None, "take it out to plan the model in the type of `dtype`"),
    "pruned_heads": ({}, "give the configuration of a model with all heads"),
    "tie_encoder_decoder": (False, "stacks that share their weights are not built"),
    "add_cross_attention": (
        False,
        "a decoder for an encoder's output is read as bart, t5, whisper",
    ),
    "cross_attention_hidden_size": (None, "cross attention from another width is not built"),
    "use_mrope": (False, "positions in three parts are not built"),
    "is_decoder": (False, "give the configuration of the model as it is published"),
}


class Fields:
    """The fields of one configuration; `defaults` are those that its family reads."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.values = values
        self.defaults = defaults

    def has(self, name: str) -> bool:
        """Is the field there, and not null?"""
        return self._get(name) is not None

    def whole(self, name: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number within bounds."""
        value = self._get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most} is needed")
        return value

    def maybe(self, name: str) -> int | None:
        """A positive whole number, or None."""
        return None if self._get(name) is None else self.whole(name)

    def number(self, name: str, least: float = 0.0) -> float:
        """A finite number that is not below `least`."""
        value = self._get(name)
        if type(value) not in (int, float) or not least <= value <= 1e300:
            raise self.wrong(name, f"a number of at least {least:g} is needed")
        return float(value)

    def switched_off(self, name: str) -> bool:
        """Does the configuration say null, or is that the default?"""
        return self.values.get(name, self.defaults[name]) is None

    def flag(self, name: str) -> bool:
        """True or false; null is a no to `transformers`, or refused, and never a yes."""
        value = self._get(name)
        if not isinstance(value, bool) or (value and self.values.get(name, value) is None):
            raise self.wrong(name, "true or false is needed")
        return value

    def text(self, name: str) -> str:
        """Text."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "text is needed")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty by default."""
        value = self._get(name) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(name, "a list of whole numbers is needed")
        return tuple(value)

    def texts(self, name: str, choices: tuple[str, ...], length: int) -> tuple[str, ...]:
        """A list of so many texts, each one of the choices; empty by default."""
        value = self._get(name)
        value = [] if value is None else value
        good = isinstance(value, list) and all(isinstance(v, str) and v in choices for v in value)
        if not good or len(value) not in (0, length):
            raise self.wrong(name, f"{length} of {', '.join(choices)} are needed")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty by default."""
        value = self._get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object is needed")
        return value or {}

    def activation(self, name: str) -> str:
        """A function of elements, by the name that it has here."""
        return self.function(self.text(name), name)

    def function(self, text: str, name: str) -> str:
        """The function that a text in the field names."""
        if text not in ACTIVATIONS:
            raise ModelError(
                f"is {text[:60]!r}", fix=f"known are {', '.join(ACTIVATIONS)}", field=name
            )
        return ACTIVATIONS[text]

    def fixed(self, name: str, fix: str) -> None:
        """Refuse any other value than the default, which is all that is built."""
        value, built = self._get(name), self.defaults[name]
        if value != built or isinstance(value, bool) != isinstance(built, bool):
            raise self.wrong(name, f"{fix} (built is {json.dumps(built)})")

    def divides(self, part: str, whole: str, a: int, b: int) -> None:
        """Refuse a `part` that does not divide the `whole`."""
        if b % a:
            raise ModelError(f"{a} does not divide {whole} {b}", fix="choose a divisor", field=part)

    def check_all_known(self, family: str, neutral: frozenset[str]) -> None:
        """Refuse the first field that is neither read nor known to change nothing."""
        fine = {*self.defaults, *neutral, *NEUTRAL, *COMMON}
        for name, value in self.values.items():
            if value is None or name in fine:
                continue
            if name in FIXED:
                built, fix = FIXED[name]
                if value != built:
                    raise self.wrong(name, fix)
                continue
            near = suggest(name, sorted(self.defaults))
            raise ModelError(
                f"is not a field of model_type {family!r} that is read, and may change the model",
                fix=f"take it out if it changes nothing ({near})",
                field=name[:80],
            )

    def _get(self, name: str) -> Any:
        value = self.values.get(name)
        return self.defaults[name] if value is None else value

    def wrong(self, name: str, needed: str) -> ModelError:
        """The field has a value that cannot be used."""
        text = repr(self.values.get(name))
        return ModelError(
            f"is {text if len(text) <= 60 else text[:57] + '...'}", fix=needed, field=name
        )
