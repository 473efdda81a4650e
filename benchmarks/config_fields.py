"""Every field of every configuration family at other values, one at a time, against `transformers`.

A tiny model of each family (`tests/zoo/hf_tiny.py`), and with `--variants` each of its variants,
gets one field changed: of those that the family reads, those that are said to change nothing,
those of the configuration class, and those inside of rotary objects and of CLIP's towers. The model
of `transformers` gets random weights, our graph the same ones, and the logits are compared:

    right     they agree to 1e-5 (of the largest, if that is above 1), and so they do for the file
              that `save_pretrained` would write
    refused   our reader names a field and says what is needed
    theirs    `transformers` makes no model of it, or cannot run it
    wrong     the rest: other logits, other parameters, a crash

Prints what is wrong, and how many there are of each; exit code 1 if anything is wrong.

    python benchmarks/config_fields.py [--variants] [FAMILY ...]
"""

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from partita.capture.reference_module import reference_module
from partita.errors import ModelError
from partita.zoo.fields import ACTIVATIONS, FIXED, NEUTRAL
from partita.zoo.hf import FAMILIES, build_config
from tests.zoo.hf_theirs import GIVES, inputs, theirs
from tests.zoo.hf_tiny import CASES, Config, tiny

SEQ = 12
TOLERANCE = 1e-5
OUTCOMES = ("right", "refused", "theirs", "wrong")
FUNCTIONS = [*ACTIVATIONS, "mish", "leaky_relu", "gelu_10", "laplace", "mystery"]
_SLIDE, _FULL = "sliding_attention", "full_attention"
_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_ROTARY: list[Any] = [
    {}, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3}, {"rope_type": "dynamic", "factor": 2.0}, _YARN,
    {**_YARN, "rope_theta": 55.0}, {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    {**_YARN, "mscale": 0.7}, {**_YARN, "mscale_all_dim": 0.5}, {**_YARN, "beta_fast": 8.0},
    {**_YARN, "beta_slow": 2.0}, {**_YARN, "truncate": False}, {**_YARN, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0],
     "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0],
     "original_max_position_embeddings": 20},
    {"rope_type": "longrope", "short_factor": [1.5], "long_factor": [3.0], "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "mystery"},
    {_SLIDE: {"rope_type": "default", "rope_theta": 33.0}},
    {_FULL: {"rope_type": "linear", "factor": 3.0}, _SLIDE: {"rope_type": "default"}},
]  # fmt: skip
# Values of fields that are neither numbers, flags nor functions.
VALUES: dict[str, list[Any]] = {
    "rope_scaling": _ROTARY,
    "rope_parameters": _ROTARY,
    "layer_types": [
        [_SLIDE, _FULL], [_FULL, _SLIDE], [_SLIDE] * 2, [_FULL] * 2, [_FULL], ["mystery"] * 2,
        ["chunked_attention", _FULL], ["chunked_attention"] * 2,
    ],
    "mlp_only_layers": [[0], [1], [0, 1], [5]],
    "mlp_layer_types": [["dense", "sparse"], ["sparse", "sparse"], ["dense", "dense"]],
    "moe_layers": [[], [0], [1], [0, 1]],
    "no_rope_layers": [[], [0, 1], [1, 0], [0, 0], [1, 1]],
    "feed_forward_proj": [*FUNCTIONS, *(f"gated-{name}" for name in FUNCTIONS), "gated-gated-relu"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", "mystery"],
    "id2label": [{}, {"0": "a"}, {"0": "a", "1": "b", "2": "c"}],
    "label2id": [{}, {"a": 0}],
    "scoring_func": ["sigmoid", "softmax", "mystery"],
    "position_embedding_type": ["absolute", "relative_key", "mystery"],
    "time_step_limit": [[0.0, 1.0], [0.5, 0.6], [0.1, None]],
    "eos_token_id": [None, 0, 2, 3, 7, 39, [3, 7]],
    "pad_token_id": [None, *range(0, 8), 39],
    "forced_decoder_ids": [[[1, 3]]],
    "alignment_heads": [[[0, 0]]],
    "dtype": ["float32", "mystery"],
    "torch_dtype": ["float32"],
    "architectures": [["Mystery"]],
    "is_encoder_decoder": [True, False],
}  # fmt: skip


def other_values(name: str, value: Any) -> list[Any]:
    """What a field is changed to: null, and what may stand there instead of its value."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(value, bool):
        return [None, not value, 1]
    if name.endswith(("_act", "activation", "activation_function", "act_fn")):
        return [None, *FUNCTIONS]
    if isinstance(value, int):
        return [None, 0, 1, 2, 3, max(value - 1, 0), value + 1, value * 2, float(value), True]
    if isinstance(value, float):
        return [None, 0, 0.0, value / 2, value * 2, value + 0.5, 1]
    if isinstance(value, str):
        return [None, "mystery"]
    return [None, True, False, 1, 2, 0.5, "relu", [0], {"x": 1}]


def changes(config: Config) -> Iterator[tuple[str, Config]]:
    """One field changed at a time, with the words for it."""
    family = config["model_type"]
    usual = CONFIG_MAPPING[family]().to_dict()
    mine = FAMILIES[family]
    names = dict.fromkeys([*mine.fields, *sorted(mine.neutral), *usual, *sorted(NEUTRAL), *FIXED])
    for name in names:
        if name in ("model_type", "transformers_version"):
            continue
        value = config.get(name, usual.get(name, mine.fields.get(name)))
        tower = {"text_config": "clip_text_model", "vision_config": "clip_vision_model"}.get(name)
        if tower is not None and isinstance(config.get(name), dict):
            for what, changed in changes({"model_type": tower, **config[name]}):
                changed = {key: item for key, item in changed.items() if key != "model_type"}
                yield f"{name}.{what}", {**config, name: changed}
            continue
        seen: list[str] = [json.dumps(value)]
        for other in other_values(name, value):
            if (text := json.dumps(other)) not in seen:
                seen.append(text)
                yield f"{name} = {text}", {**config, name: other}


def _logits(module: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = module(*given.values())
    return computed


def outcome(config: Config) -> tuple[str, str]:
    """What becomes of a configuration, and how."""
    family = config["model_type"]
    settings: Config = {"batch": 2, "seq": SEQ, "dtype": "f32", "loss": False}
    try:
        graph = build_config(config, **settings)
    except ModelError as error:
        return ("refused", str(error)) if error.field else ("wrong", f"no field named: {error}")
    except Exception as error:
        return "wrong", f"our reader: {error!r}"
    try:
        model = theirs(config)
    except Exception as error:
        return "theirs", repr(error)
    given = inputs(graph, getattr(model.config, "pad_token_id", None))
    try:
        with torch.no_grad():
            wanted = getattr(model(**given), GIVES.get(family, "logits"))
    except Exception as error:
        return "theirs", repr(error)
    try:
        written = json.loads(json.dumps(model.config.to_dict()))
        for text, made in (("", graph), (" as written", build_config(written, **settings))):
            module = reference_module(made).eval()
            missing = module.load_state_dict(model.state_dict(), strict=False).missing_keys
            if missing:
                return "wrong", f"parameters that theirs has not{text}: {missing[:3]}"
            computed = _logits(module, given)
            apart = float((computed - wanted).abs().nan_to_num(0.0).max())
            largest = float(wanted.abs().nan_to_num(0.0).max())
            same_gaps = bool((computed.isnan() == wanted.isnan()).all())
            if not same_gaps or apart > TOLERANCE * max(1.0, largest):
                return "wrong", f"logits differ{text} by {apart:.2g}"
    except Exception as error:
        return "wrong", f"our graph: {error!r}"
    return "right", ""


def main() -> int:
    """Change, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all unless some are named")
    parser.add_argument("--variants", action="store_true", help="change variants, too")
    parser.add_argument("--verbose", action="store_true", help="print every change")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    all_counts: Counter[str] = Counter()
    for family in given.families or FAMILIES:
        counts: Counter[str] = Counter()
        for variant in [v for f, v in CASES if f == family and (given.variants or v < 0)]:
            for what, config in changes(tiny(family, variant)):
                kind, why = outcome(config)
                counts[kind] += 1
                if kind == "wrong" or given.verbose:
                    where = f"{family}[{variant}]" if variant >= 0 else family
                    print(f"{kind:8}{where}: {what}: {why[:200]}", flush=True)
        all_counts += counts
        print(f"{family:18}", *(f"{name} {counts[name]:5}" for name in OUTCOMES), flush=True)
    print(f"{'all':18}", *(f"{name} {all_counts[name]:5}" for name in OUTCOMES))
    print(f"{sum(all_counts.values())} configurations, {time.process_time():.0f} s of CPU")
    return int(all_counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
