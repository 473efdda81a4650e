"""Models that nobody here wrote, piped as they are: is what comes out what the model gives?

    python benchmarks/wild.py [timm:NAME | torchvision:NAME | transformers:NAME ...]
        [--packages timm,transformers] [--every N] [--jobs 2] [--limit-s 120] [--lines FILE]
        [--cut anywhere] [--sizes] [--cpu]

Needs timm, torchvision, transformers (those that are asked for); weights are random, and sizes
small where a configuration allows it. Every model is piped in training and in eval mode, run,
switched to the other mode and run again: four checks. Each compares outputs (and their structure),
gradients of all parameters, and buffers with those of an equal module from the same seed:

    right     equal: outputs and buffers bit for bit, gradients to rounding
    refused   CaptureError or PlanError; the reason and the line stand in the table
    wrong     anything else that came back
    crash     an exception that is not ours to raise
    timeout   the model took longer than its limit

With `--sizes` it is piped in each mode for a batch of 4 and called with batches of 3, 5 and 1, and,
where all that it takes are texts, with other lengths, too; the table ends with how many of these
calls one program served.

Models run in processes of their own, forked from one that has imported the packages. With `--cpu`
each is only piped, one after the other in this process, and its CPU seconds are printed.
"""

import argparse
import collections
import contextlib
import copy
import importlib
import importlib.util
import json
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import partita
from partita.errors import PartitaError
from partita.search.base import Stop

DEVICES = 3
BATCH = 2
GRADIENT_TOLERANCE = 1e-4  # of a gradient's largest element
SEARCH = Stop(time_s=2.0, gap=0.2, evaluations=500)
CHECKS = ("train", "train, then eval", "eval", "eval, then train")
SIZES = [False]  # are other sizes tried, not other modes?
CUT = ["modules"]  # where stages begin: see partita.pipe
VERDICTS = ("right", "refused", "wrong", "crash", "timeout")

TIMM = """
    resnet18 resnet26d resnetv2_50 resnext50_32x4d seresnet50 skresnet18 ecaresnet26t
    res2net50_26w_4s densenet121 dpn48b dla34 efficientnet_b0 efficientnetv2_rw_t
    mobilenetv2_100 mobilenetv3_small_100 mobilenetv4_conv_small mnasnet_100 fbnetc_100
    hardcorenas_a ghostnet_100 lcnet_050 tinynet_e rexnet_100 regnetx_002 regnety_002 vgg11_bn
    hrnet_w18_small vovnet39a selecsls42b xception41 inception_v3 inception_v4 nasnetalarge
    pnasnet5large nfnet_f0 nf_resnet26 convnext_atto convnextv2_atto convmixer_768_32
    vit_tiny_patch16_224 vit_small_patch16_224 vit_relpos_small_patch16_224
    deit_tiny_distilled_patch16_224 deit3_small_patch16_224 beit_base_patch16_224
    beitv2_base_patch16_224 eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p16_224
    crossvit_tiny_240 coat_tiny coatnet_nano_rw_224 maxvit_nano_rw_256
    maxxvit_rmlp_nano_rw_256 convit_tiny levit_128s pit_ti_224 poolformer_s12 poolformerv2_s12
    pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 twins_pcpvt_small
    tnt_s_patch16_224 visformer_tiny volo_d1_224 mixer_s16_224 gmlp_s16_224 resmlp_12_224
    sequencer2d_s edgenext_xx_small efficientformer_l1 efficientformerv2_s0 fastvit_t8
    mobilevit_xxs mobilevitv2_050 mobileone_s0 repvgg_a0 repvit_m1 focalnet_tiny_srf
    gcvit_xxtiny hiera_tiny_224 hgnet_tiny hgnetv2_b0 inception_next_tiny metaformer_baselines
    caformer_s18 convformer_s18 davit_tiny efficientvit_b0 efficientvit_m0 mambaout_femto
    nest_tiny nextvit_small rdnet_tiny starnet_s1 tiny_vit_5m_224 tresnet_m shvit_s1
    swiftformer_xs vitamin_small_224 ese_vovnet19b_dw eca_botnext26ts_256 halonet26t
    lambda_resnet26t lamhalobotnet50ts_256 bat_resnext26ts gernet_s cspresnet50 cspdarknet53
    darknet53 botnet26t_256
"""
TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3
    maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18
    resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn
    vit_b_16 wide_resnet50_2 deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50
    lraspp_mobilenet_v3_large r3d_18 mc3_18 r2plus1d_18 s3d mvit_v1_b mvit_v2_s swin3d_t
    raft_small
"""
TRANSFORMERS = """
    albert apertus arcee aria_text audio-spectrogram-transformer bamba bart beit bert
    bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small
    bloom camembert canine codegen cohere cohere2 convbert convnext convnextv2 cpmant ctrl cvt
    data2vec-audio data2vec-text data2vec-vision dbrx deberta deberta-v2 deepseek_v2
    deepseek_v3 deit diffllama dinov2 dinov2_with_registers distilbert doge dots1 dpt
    efficientnet electra ernie ernie4_5 esm exaone4 falcon falcon_h1 falcon_mamba flaubert
    fnet focalnet fsmt funnel gemma gemma2 gemma3_text glm glm4 glm4_moe glpn gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoeshared helium
    hgnet_v2 hiera hubert hunyuan_v1_dense hunyuan_v1_moe ibert ijepa imagegpt jamba jetmoe
    layoutlm led levit lfm2 lilt llama longformer longt5 luke m2m_100 mamba mamba2 marian
    mbart megatron-bert minimax ministral mistral mixtral mobilebert mobilenet_v1 mobilenet_v2
    mobilevit mobilevitv2 modernbert modernbert-decoder moonshine mpnet mpt mra mt5 mvp
    nemotron nllb-moe nystromformer olmo olmo2 olmoe openai-gpt opt pegasus pegasus_x
    persimmon phi phi3 phimoe plbart poolformer prophetnet pvt pvt_v2 qwen2 qwen2_moe qwen3
    qwen3_moe recurrent_gemma regnet rembert resnet roberta roberta-prelayernorm roc_bert
    roformer rwkv seed_oss segformer sew sew-d smollm3 speech_to_text splinter squeezebert
    stablelm starcoder2 swiftformer swin swin2sr swinv2 switch_transformers t5 timesformer
    umt5 unispeech unispeech-sat upernet vit vit_mae vit_msn vitdet vivit wav2vec2
    wav2vec2-bert wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet
    xlstm xmod yolos yoso zamba zamba2
"""

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """What became of one model in one of the four checks."""

    model: str
    check: str
    verdict: str
    why: str = ""
    line: str = ""
    seconds: float = 0.0


# Models by name.


def make_timm(name: str) -> Made:
    """A classifier of ten classes, with stochastic depth where the model knows it."""
    timm = importlib.import_module("timm")
    settings = {"pretrained": False, "num_classes": 10}
    try:
        model = timm.create_model(name, **settings, drop_path_rate=0.1)
    except TypeError:
        model = timm.create_model(name, **settings)
    size = model.default_cfg["input_size"]
    if not model.default_cfg.get("fixed_input_size") and not name.startswith(("vit", "eva")):
        size = model.default_cfg.get("min_input_size") or (3, 128, 128)
    return model, (torch.randn(BATCH, *size),), {}


def import_package(name: str) -> Any:
    """A package by name, also where torchvision's wheel is one for CUDA and there is none.

    Its operators do not load then, and it asks for two of them while it is imported, which the
    other packages do. None of the models here calls one.
    """
    if importlib.util.find_spec("torchvision") is not None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou) -> Tensor")
        KEPT.append(library)
        importlib.import_module("torchvision")
    return importlib.import_module(name)


KEPT: list[Any] = []  # operators go when their library does


def make_torchvision(name: str) -> Made:
    """A classifier, segmenter, video or flow model without weights."""
    models = importlib.import_module("torchvision.models")
    kind = importlib.import_module(models.get_model_builder(name).__module__).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extra = {"weights_backbone": None} if "segmentation" in kind else {}
        model = models.get_model(name, weights=None, **extra)
    if "video" in kind:
        frames = 14 if name == "s3d" else 16 if name.startswith("mvit") else 8
        size = 224 if name.startswith(("mvit", "s3d")) else 64
        return model, (torch.randn(BATCH, 3, frames, size, size),), {}
    if "optical_flow" in kind:
        return model, (torch.randn(BATCH, 3, 128, 128), torch.randn(BATCH, 3, 128, 128)), {}
    size = (
        299 if name == "inception_v3" else 224 if name.startswith(("vit", "maxvit", "swin")) else 96
    )
    return model, (torch.randn(BATCH, 3, size, size),), {}


SMALL = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "dim": 32,
    "embedding_size": 16, "word_embed_proj_dim": 32, "embed_dim": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "head_dim": 8, "d_kv": 8,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "encoder_ffn_dim": 64, "d_inner": 64,
    "decoder_ffn_dim": 64, "n_inner": 64, "moe_intermediate_size": 16, "ffn_hidden_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16, "max_position_embeddings": 64, "n_positions": 64,
    "max_source_positions": 64, "max_target_positions": 64, "max_2d_position_embeddings": 64,
    "pad_token_id": 0, "image_size": 32, "patch_size": 8, "decoder_num_hidden_layers": 2,
    "decoder_hidden_size": 32, "decoder_intermediate_size": 64, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 8, "use_cache": False,
    "num_hash_buckets": 64,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # sizes that go together only so, and those that stay large
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4,
              "attn_layer_indices": [1]},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4},
    "convnext": {"patch_size": 4, "image_size": 64, "hidden_sizes": [8, 16, 32, 64],
                 "depths": [1, 1, 2, 1]},
    "convnextv2": {"patch_size": 4, "image_size": 64, "hidden_sizes": [8, 16, 32, 64],
                   "depths": [1, 1, 2, 1]},
    "deepseek_v2": {"num_key_value_heads": 4}, "deepseek_v3": {"num_key_value_heads": 4},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4,
            "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "patch_size": 8},
    "dbrx": {"vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4,
                            "moe_top_k": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"num_kv_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                  "mamba_chunk_size": 4},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "levit": {"image_size": 224, "patch_size": 16, "hidden_sizes": [16, 24, 32],
              "depths": [1, 1, 1], "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 5},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "state_size": 8},
    "prophetnet": {"num_buckets": 8, "relative_max_distance": 16},
    "squeezebert": {"embedding_size": 32},
    "swin": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
             "patch_size": 4},
    "xmod": {"default_language": "en_XX"},
    "swin2sr": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
                "patch_size": 1},
    "swinv2": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
               "patch_size": 4},
    "xlnet": {"d_head": 8},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "chunk_size": 4},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2,
              "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 4,
              "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 4,
               "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_headdim": 16, "chunk_size": 4,
               "num_key_value_heads": 4, "adapter_rank": 4, "hybrid_layer_ids": [1, 3],
               "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
AUTO = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "lm"), ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "seq2seq"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "lm"), ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "image"),
    ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", "image"), ("MODEL_FOR_CTC_MAPPING", "audio"),
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "audio"), ("MODEL_MAPPING", ""),
)  # fmt: skip
ENCODER_DECODERS = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "mbart",
                    "mvp", "pegasus", "pegasus_x", "plbart", "prophetnet", "marian")  # fmt: skip


def make_transformers(name: str) -> Made:
    """A model of a configuration made small, with a loss where its inputs are tokens."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto")
    config = _small(configs.CONFIG_MAPPING[name], OWN.get(name, {}))
    mappings = [(getattr(auto, each), kind) for each, kind in AUTO]
    if name in ENCODER_DECODERS:
        mappings.insert(0, mappings.pop(1))
    chosen = next((m[type(config)], kind) for m, kind in mappings if type(config) in m)
    cls, kind = chosen
    model = (cls[0] if isinstance(cls, tuple) else cls)(config)
    return model, (), _inputs(model, config, kind)


def _small(cls: type, own: dict[str, Any]) -> Any:
    """A configuration of small sizes; one that does not go together is left as it is."""
    default = cls()
    sizes = {
        key: value
        for key, value in SMALL.items()
        if isinstance(getattr(default, key, None), int | None) and hasattr(default, key)
    }
    sizes = {key: value for key, value in (sizes | own).items() if _can_be_set(cls, key, value)}
    for given in (sizes, {k: v for k, v in sizes.items() if "layer" in k or k == "vocab_size"}, {}):
        try:
            config = cls(**given)
        except Exception:
            continue
        for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if isinstance(getattr(config, key, None), int) or key.startswith("decoder"):
                setattr(config, key, 1)
        return config
    raise AssertionError("the last is the default")


def _can_be_set(cls: type, key: str, value: Any) -> bool:
    """Some names are worked out from others and cannot be given."""
    try:
        cls(**{key: value})
    except (AttributeError, NotImplementedError):
        return False
    except Exception:
        return True  # by itself it does not go together with the rest
    return True


def _inputs(model: nn.Module, config: Any, kind: str) -> dict[str, Any]:
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = getattr(config, "image_size", 64) or 64
        pair = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(config, "num_channels", 3)
        frames = (getattr(config, "num_frames", 0),) if "num_frames" in vars(config) else ()
        return {"pixel_values": torch.randn(BATCH, *frames, channels, *pair)}
    if main == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        shape = (BATCH, getattr(config, "max_length", 64), bins) if bins else (BATCH, 4000)
        return {"input_values": torch.randn(*shape), **_decoder(config)}
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_projection_input_dim", 80))
        frames = 2 * getattr(config, "max_source_positions", 32)
        shape = (
            (BATCH, bins, frames) if type(config).__name__ == "WhisperConfig" else (BATCH, 32, bins)
        )
        return {"input_features": torch.randn(*shape), **_decoder(config)}
    vocabulary = min(getattr(config, "vocab_size", 99) or 99, 90)
    ids = torch.randint(5, max(vocabulary, 6), (BATCH, 12))
    given: dict[str, Any] = {"input_ids": ids}
    if kind in ("lm", "seq2seq"):
        given["labels"] = ids.clone()
    elif getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids.clone()
    return given


def _decoder(config: Any) -> dict[str, Any]:
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    return {"decoder_input_ids": torch.randint(5, 90, (BATCH, 6))}


PACKAGES: dict[str, tuple[Callable[[str], Made], str]] = {
    "timm": (make_timm, TIMM),
    "torchvision": (make_torchvision, TORCHVISION),
    "transformers": (make_transformers, TRANSFORMERS),
}


def made(name: str, batch: int = BATCH) -> Made:
    """A model by its package and name with random weights from one seed, and its arguments."""
    global BATCH  # the makers above read it
    package, _, model = name.partition(":")
    BATCH = batch
    torch.manual_seed(0)
    return PACKAGES[package][0](model)


# One model.


def checks(name: str) -> Iterator[Check]:
    """The four checks of one model, each given as soon as it is known."""
    try:
        module, args, kwargs = made(name)
        reference = copy.deepcopy(module)
        for training in (True, False):
            observed(module.train(training), args, kwargs)
        module = reference
    except Exception as error:
        yield Check(name, "", "unbuilt", f"{type(error).__name__}: {error}"[:300])
        return
    for training in (True, False):
        if SIZES[0]:
            yield from _sizes(name, training)
        else:
            yield from _mode(name, copy.deepcopy(module), training, args, kwargs)


def _sizes(name: str, training: bool) -> Iterator[Check]:
    """The model piped for one size in one mode and called with others."""
    module, args, kwargs = made(name, 4)
    module.train(training)
    plain = copy.deepcopy(module)
    word = "train" if training else "eval"
    try:
        piped = partita.pipe(module, args, kwargs, devices=DEVICES, stop=SEARCH, cut=CUT[0])
    except PartitaError as error:
        yield Check(name, word, "refused", error.found, error.file)
        return
    for batch, length in ((3, None), (5, None), (3, 8), (5, 10), (1, None)):
        given = made(name, batch)[1:]
        if length is not None:
            if not all(_is_text(leaf) for leaf in pytree.tree_leaves(given)):
                continue
            given = pytree.tree_map_only(torch.Tensor, lambda x, n=length: x[:, :n], given)
        try:
            wanted = observed(plain, *given)
        except Exception:  # the model itself does not take it
            continue
        yield _sized(name, f"{word}, batch {batch}, length {length}", piped, given, wanted)


def _sized(name: str, check: str, piped: Any, given: Any, wanted: "Observed") -> Check:
    start = time.process_time()
    verdict, why, line = "right", "", ""
    try:
        why = difference(observed(piped, *given), wanted)
        verdict = "wrong" if why else "right"
    except PartitaError as error:
        verdict, why, line = "refused", error.found, error.file
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict, why = "crash", f"{type(error).__name__}: {error}"[:300]
        line = f"{where.filename}:{where.lineno}"
    if verdict == "right" and piped._now.served.sizes is not None:
        line = "served by one program"
    return Check(name, check, verdict, why, line, time.process_time() - start)


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()


def _mode(
    name: str, module: nn.Module, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Check]:
    plain = copy.deepcopy(module).train(training)
    piped: nn.Module | None = None
    for check, mode in zip(
        CHECKS[:2] if training else CHECKS[2:], (training, not training), strict=True
    ):
        start = time.monotonic()
        verdict, why, line = "right", "", ""
        try:
            if piped is None:
                module.train(training)
                piped = partita.pipe(module, args, kwargs, devices=DEVICES, stop=SEARCH, cut=CUT[0])
            piped.train(mode)
            outcome = observed(piped, args, kwargs)
            why = difference(outcome, observed(plain.train(mode), args, kwargs))
            verdict = "wrong" if why else "right"
        except PartitaError as error:
            verdict, why, line = "refused", error.found, error.file
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            verdict, why = "crash", f"{type(error).__name__}: {error}"[:300]
            line = f"{where.filename}:{where.lineno}"
        yield Check(name, check, verdict, why, line, time.monotonic() - start)
        if piped is None:
            return


Observed = tuple[Any, list[Any], dict[str, Any], dict[str, torch.Tensor]]


def observed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
    """Structure, outputs, gradients and buffers of one call from one seed."""
    torch.manual_seed(1)
    module.zero_grad(set_to_none=True)
    leaves, spec = pytree.tree_flatten(module(*args, **kwargs))
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            total = total + (leaf.double() * torch.randn(leaf.shape, generator=generator)).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    outputs = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    return spec, outputs, gradients, buffers


def difference(outcome: Observed, wanted: Observed) -> str:
    """What is not the same; empty if nothing."""
    if outcome[0] != wanted[0]:
        return "the structure of the outputs"
    for number, (a, b) in enumerate(zip(outcome[1], wanted[1], strict=True)):
        same = _equal(a, b) if isinstance(b, torch.Tensor) else a == b
        if not same:
            return f"output {number}{_distance(a, b)}"
    for name, b in wanted[2].items():
        if not _close(outcome[2][name], b):
            return f"the gradient of {name}{_distance(outcome[2][name], b)}"
    for name, b in wanted[3].items():
        if not _equal(outcome[3][name], b):
            return f"buffer {name}{_distance(outcome[3][name], b)}"
    return ""


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    )


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:  # a parameter that is not used: no gradient, or zeros
        return all(each is None or not each.any() for each in (a, b))
    if a.shape != b.shape:
        return False
    largest = b.nan_to_num(7).abs().max() if b.numel() else 0
    return bool(((a - b).nan_to_num(0).abs() <= GRADIENT_TOLERANCE * largest + 1e-12).all())


def _distance(a: Any, b: Any) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        return f", by up to {(a.double() - b.double()).abs().max().item():.1e}"
    return ""


# All of them, in processes.


def child(name: str, end: Connection) -> None:
    """Run one model's checks and send each through the pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for check in checks(name):
        end.send(check)
    end.close()


def run(names: list[str], jobs: int, limit_s: float) -> Iterator[list[Check]]:
    """The checks of every model, as models end."""
    context = multiprocessing.get_context("fork")
    waiting = collections.deque(names)
    running: dict[Connection, tuple[str, Any, float, list[Check]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(name, there), daemon=True)
            process.start()
            there.close()
            running[here] = name, process, time.monotonic() + limit_s, []
        ready = set(wait(list(running), timeout=1.0))
        for end, (name, process, deadline, known) in list(running.items()):
            ended = time.monotonic() > deadline
            verdict = "timeout"
            if end in ready:
                try:
                    known.append(end.recv())  # type: ignore[arg-type]
                    continue
                except EOFError:
                    ended, verdict = True, "crash"
            if ended:
                process.kill() if verdict == "timeout" else process.join()
                if verdict == "timeout" or process.exitcode:
                    known.append(Check(name, "", verdict, f"exit code {process.exitcode}"))
                del running[end]
                yield known


def read_lines(file: Path | None) -> list[Check]:
    """The checks that a run before this one has left in a file."""
    if file is None or not file.exists():
        return []
    return [Check(**json.loads(line)) for line in file.read_text().splitlines()]


def append_lines(file: Path | None, checks: list[Check]) -> None:
    """Leave checks in a file, for a run that goes on."""
    if file is not None:
        with file.open("a") as stream:
            stream.writelines(json.dumps(asdict(check)) + "\n" for check in checks)


def time_pipe(names: list[str]) -> None:
    """CPU seconds of `partita.pipe` with its own settings, after a first call that imports."""
    start = time.process_time()
    partita.pipe(nn.Linear(4, 4), (torch.randn(2, 4),), devices=2)
    print(f"first call {time.process_time() - start:.2f} s", flush=True)
    for name in names:
        module, args, kwargs = made(name)
        module.train()
        start = time.process_time()
        partita.pipe(module, args, kwargs, devices=DEVICES, cut=CUT[0])
        print(f"{name} {time.process_time() - start:.2f} s", flush=True)


def table(results: list[Check]) -> str:
    """Models by package and by what became of their checks."""
    rows = ["| package | models | check | " + " | ".join(VERDICTS) + " |"]
    rows.append("|---" * (len(VERDICTS) + 3) + "|")
    for package in PACKAGES:
        own = [c for c in results if c.model.startswith(f"{package}:") and c.verdict != "unbuilt"]
        models = len({c.model for c in own})
        checks = dict.fromkeys(c.check for c in own if c.check) if SIZES[0] else CHECKS
        for check in checks if own else ():
            counts = collections.Counter(c.verdict for c in own if c.check == check)
            rows.append(
                f"| {package} | {models} | {check} | "
                + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |"
            )  # fmt: skip
    if SIZES[0]:
        served = sum(bool(c.line) for c in results if c.verdict == "right")
        rows.append(f"{served} of these calls were served by a program for many sizes")
    return "\n".join(rows)


def main() -> None:
    """Run the models asked for and print the table and what was not right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="package:model; else all of --packages")
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--every", type=int, default=1, help="only each so-many-th model")
    parser.add_argument("--lines", type=Path, help="a line for each check; models in it are kept")
    parser.add_argument("--cut", default="modules", choices=("modules", "anywhere"))
    parser.add_argument("--sizes", action="store_true", help="other batches and lengths")
    parser.add_argument("--cpu", action="store_true", help="only CPU seconds of partita.pipe")
    options = parser.parse_args()
    CUT[0], SIZES[0] = options.cut, options.sizes
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    packages = options.packages.split(",")
    every = [f"{p}:{name}" for p in packages for name in PACKAGES[p][1].split()][:: options.every]
    names = options.names or every
    for package in {name.partition(":")[0] for name in names}:
        import_package(package)
    if options.cpu:
        time_pipe(names)
        return
    results = read_lines(options.lines)
    known = {check.model for check in results}
    names = [name for name in names if name not in known]
    for done in run(names, options.jobs, options.limit_s):
        results += done
        append_lines(options.lines, done)
        for check in done:
            if check.verdict != "right":
                print(
                    f"{check.verdict:8} {check.model} [{check.check}] {check.why} {check.line}",
                    flush=True,
                )
        print(f"{done[0].model if done else '?'}: {' '.join(c.verdict for c in done)} "
              f"{sum(c.seconds for c in done):.0f} s", flush=True)  # fmt: skip
    print(table(results))


if __name__ == "__main__":
    main()
