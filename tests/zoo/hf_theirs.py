"""Models of `transformers` with random weights that matter, and what they are given."""

import json

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BartForConditionalGeneration,
    BertForMaskedLM,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    RobertaForMaskedLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
    WhisperForConditionalGeneration,
)

from partita.graph.record import Graph
from tests.zoo.hf_tiny import Config

CLASSES = {
    "bert": BertForMaskedLM,
    "roberta": RobertaForMaskedLM,
    "t5": T5ForConditionalGeneration,
    "bart": BartForConditionalGeneration,
    "whisper": WhisperForConditionalGeneration,
    "vit": ViTForImageClassification,
    "clip": CLIPModel,
    "clip_text_model": CLIPTextModelWithProjection,
    "clip_vision_model": CLIPVisionModelWithProjection,
}  # those that are no causal language models
# What is compared, where a model gives no logits.
GIVES = {
    "clip": "logits_per_image", "clip_text_model": "text_embeds",
    "clip_vision_model": "image_embeds",
}  # fmt: skip


def theirs(config: Config) -> PreTrainedModel:
    """The model of `transformers`, with weights that matter: norms and biases are random, too."""
    given = {name: value for name, value in config.items() if name != "model_type"}
    read = CONFIG_MAPPING[config["model_type"]](**json.loads(json.dumps(given)))
    if config["model_type"] in CLASSES:
        model = CLASSES[config["model_type"]]._from_config(read, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(read, attn_implementation="eager")
    model = model.eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            scale = 0.7 * value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
            drawn = torch.randn(value.shape, generator=generator) * scale
            value.copy_(drawn + (value.ndim == 1 and name.endswith("norm.weight")))
    return model


def inputs(graph: Graph, padding: int | None = None) -> dict[str, torch.Tensor]:
    """What a model is given, by name; ids are no `padding`: graphs are of whole texts."""
    generator = torch.Generator().manual_seed(1)
    drawn = {}
    for tensor in graph.inputs:
        if tensor.dtype == "f32":
            drawn[tensor.name] = torch.randn(tensor.shape, generator=generator)
        elif tensor.name == "token_type_ids":
            drawn[tensor.name] = torch.randint(0, 2, tensor.shape, generator=generator)
        else:
            ids = torch.randint(3, 40, tensor.shape, generator=generator)
            drawn[tensor.name] = ids if padding is None else ids.masked_fill(ids == padding, 2)
    return drawn
