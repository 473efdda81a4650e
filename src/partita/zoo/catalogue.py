"""Every model of the zoo with its published figures; the source stands beside each.

Parameters without a tolerance are equal to the last digit. Operations are those of contractions
(see `figures.py`); where a source counts less than that, the tolerance says how much less.
"""

from dataclasses import replace

from partita.zoo.model import ZooModel

_TORCHVISION = "torchvision weights metadata (num_params, _ops)"
_GPT3 = "Brown et al. 2020, table D.1 (parameters; training FLOPs / 3 / 300e9 tokens)"
_HF_T5 = "Hugging Face t5 checkpoints (v1.0); Raffel et al. 2019, section 3.7"
_XIE = "Xie et al. 2019 (RandWire), tables 2 and 3; our own wiring, so not exact"


def _image(
    name: str, summary: str, builder: str, parameters: float, gmacs: float, size: int = 224,
    source: str = _TORCHVISION, preset: tuple[tuple[str, str | int], ...] = (),
) -> ZooModel:  # fmt: skip
    """A classifier whose source gives multiply-adds in thousands of millions."""
    return ZooModel(
        name, summary, builder, "size", size, 32, parameters, source,
        flops=2e9 * gmacs, preset=preset,
    )  # fmt: skip


def _text(
    name: str, summary: str, builder: str, variant: str, seq: int, batch: int, parameters: float,
    source: str,
) -> ZooModel:  # fmt: skip
    """A language model; its builder takes the variant."""
    return ZooModel(
        name, summary, builder, "seq", seq, batch, parameters, source,
        preset=(("variant", variant),),
    )  # fmt: skip


def _gpt3(variant: str, millions: int, training_flops: float, attention: float) -> ZooModel:
    """Table D.1 leaves attention scores out; `attention` is their share of what it counts."""
    entry = _text(
        f"gpt3-{variant}", f"GPT-3 {variant.upper()}", "gpt:gpt3", variant, 2048, 1,
        1e6 * millions, _GPT3,
    )  # fmt: skip
    forward = training_flops / 3 / 300e9 * 2048
    return replace(
        entry, parameters_tolerance=0.005, flops=forward, flops_tolerance=attention + 0.01
    )


_ALL = (
    _image("alexnet", "AlexNet, one column", "alexnet:alexnet", 61_100_840, 0.714),
    _image("vgg16", "VGG-16", "vgg:vgg16", 138_357_544, 15.47),
    _image("resnet50", "ResNet-50", "resnet:resnet50", 25_557_032, 4.089),
    _image("resnet101", "ResNet-101", "resnet:resnet101", 44_549_160, 7.801),
    _image("resnext50", "ResNeXt-50 32x4d", "resnet:resnext50", 25_028_904, 4.23),
    _image("resnext101", "ResNeXt-101 32x8d", "resnet:resnext101", 88_791_336, 16.414),
    # torchvision's 27,161,264 parameters less the auxiliary classifier's 3,326,696.
    _image(
        "inception_v3", "Inception v3", "inception:inception_v3", 23_834_568, 5.713, 299,
        f"{_TORCHVISION}, without the auxiliary classifier",
    ),
    _image("densenet121", "DenseNet-121", "densenet:densenet121", 7_978_856, 2.834),
    _image("squeezenet1_0", "SqueezeNet 1.0", "squeezenet:squeezenet1_0", 1_248_424, 0.819),
    _image("squeezenet1_1", "SqueezeNet 1.1", "squeezenet:squeezenet1_1", 1_235_496, 0.349),
    _image(
        "nasnet_large", "NASNet-A (6 @ 4032)", "nasnet:nasnet_large", 88_753_150, 23.8, 331,
        "timm nasnetalarge (parameters); Zoph et al. 2017, table 2 (88.9M, 23.8B multiply-adds)",
    ),
    replace(
        _image("randwire_small", "RandWire-WS, small regime, C=78", "randwire:randwire_small",
               5.6e6, 0.583, source=_XIE),
        parameters_tolerance=0.03, flops_tolerance=0.05,
    ),
    replace(
        _image("randwire", "RandWire-WS, regular regime, C=109", "randwire:randwire",
               31.9e6, 4.0, source=_XIE),
        parameters_tolerance=0.03, flops_tolerance=0.05,
    ),
    replace(
        _image("randwire_large", "RandWire-WS, regular regime, C=154", "randwire:randwire_large",
               61.5e6, 7.9, source=_XIE),
        parameters_tolerance=0.03, flops_tolerance=0.05,
    ),
    ZooModel(
        "unet", "U-Net, unpadded", "unet:unet", "size", 572, 1, 31_030_658,
        "computed from Ronneberger et al. 2015, figure 1 (1 channel in, 2 out, with biases)",
    ),
    _image("vit-b16", "ViT-B/16", "vit:vit", 86_567_656, 17.564, preset=(("variant", "b16"),)),
    _image("vit-l16", "ViT-L/16", "vit:vit", 304_326_632, 61.555, preset=(("variant", "l16"),)),
    _image("vit-h14", "ViT-H/14", "vit:vit", 632_045_800, 167.295, preset=(("variant", "h14"),)),
    ZooModel(
        "rnnlm", "LSTM language model, 2 x 2048", "recurrent:rnnlm", "seq", 256, 64, 476_841_632,
        "computed: sizes of PaSE (Elango 2021), 2 v d + v + 2 * 4 d (2 d + 2)",
    ),
    ZooModel(
        "lstm", "10 LSTM layers of 256, unrolled", "recurrent:lstm", "seq", 100, 1, 5_263_360,
        "computed: sizes of Rammer (Ma et al. 2020), 10 * 4 h (2 h + 2)",
    ),
    ZooModel(
        "seq2seq", "LSTM encoder 8x100, decoder 4x30 of 128, unrolled", "recurrent:seq2seq",
        "seq", 100, 1, 1_585_152,
        "computed: sizes of Rammer (Ma et al. 2020), 12 * 4 h (2 h + 2)",
    ),
    ZooModel(
        "deepspeech2", "Deep Speech 2, 5 bidirectional LSTM layers", "deepspeech2:deepspeech2",
        "seq", 201, 16, 86_618_400,
        "computed: sizes of deepspeech.pytorch (also PLoS Biology 21(12) e3002366, table 5)",
    ),
    replace(
        _text("transformer-base", "Transformer base", "transformer:transformer", "base", 256, 32,
              65e6, "Vaswani et al. 2017, table 3"),
        parameters_tolerance=0.04,
    ),
    replace(
        _text("transformer-big", "Transformer big", "transformer:transformer", "big", 256, 32,
              213e6, "Vaswani et al. 2017, table 3"),
        parameters_tolerance=0.01,
    ),
    replace(
        _text("bert-base", "BERT base with masked-LM head", "bert:bert", "base", 512, 8,
              109_514_298, "Hugging Face BertForMaskedLM of bert-base-uncased"),
        # 2 operations per parameter and token, attention scores (8 %) left out.
        flops=1.64e20 / 3 / 250e9 * 512, flops_tolerance=0.095,
        flops_source="Brown et al. 2020, table D.1 (1.64e20 / 3 / 250e9 tokens)",
    ),
    _text("bert-large", "BERT large with masked-LM head", "bert:bert", "large", 512, 8,
          335_174_458, "Hugging Face BertForMaskedLM of bert-large-uncased"),
    _text("gpt2", "GPT-2 small", "gpt:gpt2", "small", 1024, 8,
          124_439_808, "Hugging Face GPT2LMHeadModel of gpt2"),
    _text("gpt2-medium", "GPT-2 medium", "gpt:gpt2", "medium", 1024, 8,
          354_823_168, "Hugging Face GPT2LMHeadModel of gpt2-medium"),
    _text("gpt2-large", "GPT-2 large", "gpt:gpt2", "large", 1024, 8,
          774_030_080, "Hugging Face GPT2LMHeadModel of gpt2-large"),
    _text("gpt2-xl", "GPT-2 XL", "gpt:gpt2", "xl", 1024, 8,
          1_557_611_200, "Hugging Face GPT2LMHeadModel of gpt2-xl"),
    _gpt3("125m", 125, 2.25e20, 0.14),
    _gpt3("350m", 356, 6.41e20, 0.14),
    _gpt3("760m", 760, 1.37e21, 0.10),
    _gpt3("1.3b", 1_320, 2.38e21, 0.07),
    _gpt3("2.7b", 2_650, 4.77e21, 0.06),
    _gpt3("6.7b", 6_660, 1.20e22, 0.04),
    _gpt3("13b", 12_850, 2.31e22, 0.03),
    _gpt3("175b", 174_600, 3.14e23, 0.02),
    _text("llama-7b", "LLaMA 7B", "llama:llama", "7b", 2048, 1, 6_738_415_616,
          "Hugging Face LlamaForCausalLM; Touvron et al. 2023a, table 2"),
    _text("llama-13b", "LLaMA 13B", "llama:llama", "13b", 2048, 1, 13_015_864_320,
          "Hugging Face LlamaForCausalLM; Touvron et al. 2023a, table 2"),
    _text("llama-33b", "LLaMA 33B", "llama:llama", "33b", 2048, 1, 32_528_943_616,
          "Hugging Face LlamaForCausalLM; Touvron et al. 2023a, table 2"),
    _text("llama-65b", "LLaMA 65B", "llama:llama", "65b", 2048, 1, 65_285_660_672,
          "Hugging Face LlamaForCausalLM; Touvron et al. 2023a, table 2"),
    _text("llama-2-7b", "Llama 2 7B", "llama:llama", "2-7b", 4096, 1, 6_738_415_616,
          "Hugging Face meta-llama/Llama-2-7b-hf"),
    _text("llama-2-13b", "Llama 2 13B", "llama:llama", "2-13b", 4096, 1, 13_015_864_320,
          "Hugging Face meta-llama/Llama-2-13b-hf"),
    _text("llama-2-70b", "Llama 2 70B", "llama:llama", "2-70b", 4096, 1, 68_976_648_192,
          "Hugging Face meta-llama/Llama-2-70b-hf"),
    _text("llama-3-8b", "Llama 3 8B", "llama:llama", "3-8b", 8192, 1, 8_030_261_248,
          "Hugging Face meta-llama/Meta-Llama-3-8B"),
    _text("llama-3-70b", "Llama 3 70B", "llama:llama", "3-70b", 8192, 1, 70_553_706_496,
          "Hugging Face meta-llama/Meta-Llama-3-70B"),
    replace(
        _text("llama-3-405b", "Llama 3 405B", "llama:llama", "3-405b", 8192, 1, 405_853_388_800,
              "Hugging Face meta-llama/Llama-3.1-405B"),
        # 6 operations per parameter and token, attention scores (4 %) left out.
        flops=3.8e25 / 3 / 15.6e12 * 8192, flops_tolerance=0.05,
        flops_source="Grattafiori et al. 2024, section 3 (3.8e25 / 3 / 15.6e12 tokens)",
    ),
    _text("mixtral-8x7b", "Mixtral 8x7B", "llama:mixtral", "8x7b", 4096, 1, 46_702_792_704,
          "Hugging Face mistralai/Mixtral-8x7B-v0.1"),
    _text("mixtral-8x22b", "Mixtral 8x22B", "llama:mixtral", "8x22b", 4096, 1, 140_620_634_112,
          "Hugging Face mistral-community/Mixtral-8x22B-v0.1"),
    _text("t5-small", "T5 small", "t5:t5", "small", 512, 8, 60_506_624, _HF_T5),
    _text("t5-base", "T5 base", "t5:t5", "base", 512, 8, 222_903_552, _HF_T5),
    _text("t5-large", "T5 large", "t5:t5", "large", 512, 8, 737_668_096, _HF_T5),
    _text("t5-3b", "T5 3B", "t5:t5", "3b", 512, 8, 2_851_598_336, _HF_T5),
    _text("t5-11b", "T5 11B", "t5:t5", "11b", 512, 8, 11_307_321_344, _HF_T5),
    ZooModel(
        "moe", "Switch-Base with 128 experts", "t5:moe", "seq", 512, 64, 7.4e9,
        "Fedus et al. 2021 (7.4B sparse parameters); sizes of google/switch-base-128",
        parameters_tolerance=0.005,
    ),
)  # fmt: skip

MODELS: dict[str, ZooModel] = {model.name: model for model in _ALL}

ALIASES = {
    "alexnet-owt": "alexnet",
    "bert": "bert-base",
    "gpt2-small": "gpt2",
    "gpt3": "gpt3-175b",
    "inception": "inception_v3",
    "llama": "llama-7b",
    "llama-2": "llama-2-7b",
    "llama-3": "llama-3-8b",
    "mixtral": "mixtral-8x7b",
    "nasnet": "nasnet_large",
    "randwire_regular": "randwire",
    "resnext": "resnext50",
    "resnext101_32x8d": "resnext101",
    "resnext50_32x4d": "resnext50",
    "squeezenet": "squeezenet1_0",
    "switch-base-128": "moe",
    "t5": "t5-base",
    "transformer": "transformer-big",
    "vit": "vit-b16",
    "vit_b_16": "vit-b16",
    "vit_h_14": "vit-h14",
    "vit_l_16": "vit-l16",
}
