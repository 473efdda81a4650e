"""ONNX files as real exporters write them, read as graphs and held against the captured module.

    python benchmarks/onnx_exports.py [FORM:MODEL ...] [--forms dynamo,script] [--keep FOLDER]

Needs onnxscript, onnxruntime (onnxruntime-genai for `builder`), and for the models timm and
transformers. Every model of `wild.py` named here is made with random weights and written as

    script     torch.onnx.export(dynamo=False)
    dynamo     torch.onnx.export(dynamo=True)
    optimum    the same with Optimum's own configuration, where it has one for this transformers
    fused      onnxruntime.transformers.optimizer: Attention, SkipLayerNormalization, BiasGelu, ...
    extended   what onnxruntime itself saves after its optimisations
    dynamic    onnxruntime.quantization.quantize_dynamic: MatMulInteger, ConvInteger
    qdq        quantize_static, QuantizeLinear and back around every product
    operators  quantize_static, QLinearMatMul, QLinearConv
    bits       MatMulNBits, weights of four bits
    builder    onnxruntime-genai's model builder: GroupQueryAttention, RotaryEmbedding
    builder4   the same with weights of four bits

Each file is read, planned and partitioned; its parameters and its FLOPs are those of the captured
module but for what the form leaves out. Files of tf2onnx are read where they are: FILE.onnx.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))

import wild

from partita.capture import capture
from partita.capture.onnx_file import onnx_graph
from partita.errors import PartitaError
from partita.graph import Graph
from partita.graph.shapes import unknown_kinds
from partita.graph.work import flops

MODELS = (
    "timm:resnet18", "timm:mobilenetv3_small_100", "timm:vit_tiny_patch16_224",
    "timm:convnext_atto", "timm:swin_tiny_patch4_window7_224", "timm:efficientnet_b0",
    "transformers:bert", "transformers:gpt2", "transformers:llama", "transformers:mistral",
    "transformers:qwen3", "transformers:gemma2", "transformers:t5", "transformers:bart",
    "transformers:vit", "transformers:distilbert", "transformers:opt", "transformers:phi3",
)  # fmt: skip
PRODUCTS = ("conv", "linear", "matmul", "einsum", "attention", "lstm", "gru")
LARGER = {
    "vocab_size": 999, "hidden_size": 128, "d_model": 128, "n_embd": 128, "dim": 128,
    "word_embed_proj_dim": 128, "intermediate_size": 512, "ffn_dim": 512, "d_ff": 512,
    "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "n_inner": 512, "hidden_dim": 512,
    "head_dim": 32, "d_kv": 32,
}  # fmt: skip
Example = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


class Plain(torch.nn.Module):
    """A model that gives tensors alone: logits, without a loss."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first tensor that the model gives."""
        return pytree.tree_leaves(self.inner(*args, **kwargs))[0]


def example(name: str) -> Example:
    """A model in eval mode and the arguments of one call."""
    module, args, kwargs = wild.made(name)
    kwargs = {key: value for key, value in kwargs.items() if key != "labels"}
    if name.endswith((":t5", ":bart")):
        kwargs["decoder_input_ids"] = kwargs["input_ids"].clone()
    for parameter in module.parameters():  # equal ones would be written once
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    return module.eval(), args, kwargs


# The forms: each writes a file.


def script(model: Example, path: Path, opset: int = 17) -> None:
    """The exporter that follows a trace."""
    module, args, kwargs = model
    names = [f"given{i}" for i in range(len(args))] + list(kwargs)
    torch.onnx.export(
        Named(module, tuple(kwargs)), (*args, *kwargs.values()), str(path), dynamo=False,
        opset_version=opset, input_names=names,
    )  # fmt: skip


class Named(Plain):
    """A model whose arguments by name are given in order."""

    def __init__(self, inner: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.names = names

    def forward(self, *given: Any) -> Any:
        """The first tensor that the model gives."""
        count = len(given) - len(self.names)
        named = dict(zip(self.names, given[count:], strict=True))
        return super().forward(*given[:count], **named)


def dynamo(model: Example, path: Path, opset: int | None = None) -> None:
    """The exporter that goes through torch.export."""
    module, args, kwargs = model
    torch.onnx.export(
        Plain(module), args, str(path), kwargs=kwargs, dynamo=True, external_data=False,
        opset_version=opset, verbose=False,
    )  # fmt: skip


def plain(model: Example, path: Path) -> Path:
    """A file beside the one wanted, of the first exporter that can write it."""
    beside = path.with_suffix(".plain.onnx")
    try:
        script(model, beside)
    except Exception:
        dynamo(model, beside)
    return beside


def optimum(model: Example, path: Path) -> None:
    """Optimum's exporter with the configuration that it has for a model."""
    onnx = importlib.import_module("optimum.exporters.onnx")
    importlib.import_module("optimum.exporters.onnx.model_configs")
    tasks = importlib.import_module("optimum.exporters.tasks").TasksManager
    module = model[0]
    task = tasks.infer_task_from_model(module)
    make = tasks.get_exporter_config_constructor(
        "onnx", model=module, task=task, library_name="transformers"
    )
    onnx.export(module, make(module.config), path, device="cpu")


def fused(model: Example, path: Path) -> None:
    """What onnxruntime's scripts for transformers make of a traced file."""
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    source = plain(model, path)
    config = getattr(model[0], "config", None)
    kind = {"bert": "bert", "gpt2": "gpt2", "vit": "vit", "bart": "bart", "t5": "t5"}.get(
        getattr(config, "model_type", ""), "bert"
    )
    heads = getattr(config, "num_attention_heads", 0) or getattr(config, "n_head", 0) or 0
    width = getattr(config, "hidden_size", 0) or 0
    optimizer.optimize_model(
        str(source), model_type=kind, num_heads=heads, hidden_size=width
    ).save_model_to_file(str(path))


def extended(model: Example, path: Path) -> None:
    """What onnxruntime saves after its own optimisations."""
    runtime = importlib.import_module("onnxruntime")
    source = plain(model, path)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    runtime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def dynamic(model: Example, path: Path) -> None:
    """Activations quantised as they come."""
    quantization = importlib.import_module("onnxruntime.quantization")
    source = plain(model, path)
    quantization.quantize_dynamic(str(source), str(path))


def static(model: Example, path: Path, operators: bool) -> None:
    """Activations quantised by what they were for one batch."""
    quantization = importlib.import_module("onnxruntime.quantization")
    source = plain(model, path)
    _, args, kwargs = model
    names = [f"given{i}" for i in range(len(args))] + list(kwargs)
    values = [value.numpy() for value in (*args, *kwargs.values())]
    feeds = iter([dict(zip(names, values, strict=True))])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(feeds, None)

    form = quantization.QuantFormat
    quantization.quantize_static(
        str(source), str(path), Reader(),
        quant_format=form.QOperator if operators else form.QDQ,
    )  # fmt: skip


def bits(model: Example, path: Path) -> None:
    """Weights of four bits in blocks."""
    import onnx

    quantizer = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    source = plain(model, path)
    made = quantizer.MatMulNBitsQuantizer(onnx.load(str(source)), block_size=32, is_symmetric=True)
    made.process()
    made.model.save_model_to_file(str(path))


def words(folder: Path) -> None:
    """A vocabulary, which the builder copies."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    known = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(known), eos_token="a", unk_token="[UNK]"
    )
    made.save_pretrained(folder)


def builder(model: Example, path: Path, precision: str) -> None:
    """onnxruntime-genai's builder, which writes a decoder from its configuration and weights."""
    build = importlib.import_module("onnxruntime_genai.models.builder")
    folder = path.with_suffix("")
    folder.mkdir()
    model[0].save_pretrained(folder / "weights")
    words(folder / "weights")
    where = "", str(folder / "weights"), str(folder / "made"), precision, "cpu", str(folder)
    build.create_model(*where, **build.parse_extra_options(*where, ["hf_token=false"]))
    (folder / "made" / "model.onnx").rename(path)
    for data in (folder / "made").glob("model.onnx.data"):
        data.rename(path.parent / data.name)


FORMS: dict[str, Callable[[Example, Path], None]] = {
    "script": script,
    "dynamo": dynamo,
    "optimum": optimum,
    "fused": fused,
    "extended": extended,
    "dynamic": dynamic,
    "qdq": functools.partial(static, operators=False),
    "operators": functools.partial(static, operators=True),
    "bits": bits,
    "builder": functools.partial(builder, precision="fp32"),
    "builder4": functools.partial(builder, precision="int4"),
}


# Reading them.


def total(graph: Graph) -> float:
    """Operations of a whole graph."""
    return sum(flops(graph.call(op)) for op in graph.ops)


def products(graph: Graph) -> float:
    """Operations of layers and products alone, which no form rewrites."""
    return sum(flops(graph.call(op)) for op in graph.ops if op.kind in PRODUCTS)


def held(graph: Graph) -> int:
    """Numbers that a file holds, learned or not."""
    return sum(
        functools.reduce(lambda a, b: a * b, t.shape, 1)
        for t in graph.tensors
        if t.role in ("parameter", "state")
    )


def look(path: Path, spec: str, batch: int) -> tuple[Graph, dict[str, Any]]:
    """A file as graph, planned and partitioned."""
    from click.testing import CliRunner

    from partita.cli import partita

    graph = onnx_graph(spec, batch)
    ended = {}
    for words in (
        ("plan", spec, "--infer", "-o", str(path.with_suffix(".json"))),
        ("partition", spec, "--infer"),
    ):
        more = ["-c", "4xA100", "--batch", str(batch), "--time-limit", "2", "--quiet"]
        result = CliRunner().invoke(partita, [*words, *more])
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        good = result.exit_code == 0
        ended[words[0]] = "right" if good else f"{result.exit_code}: {(said or [''])[-1][:200]}"
    return graph, ended


def row(name: str, form: str, folder: Path) -> dict[str, Any]:
    """What became of one model in one form."""
    model = example(name)
    path = folder / f"{form}_{name.replace(':', '_')}.onnx"
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with quiet, contextlib.redirect_stderr(io.StringIO()):
            FORMS[form](model, path)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        return {"model": name, "form": form, "unwritten": f"{type(error).__name__}: {said[:150]}"}
    spec, batch = str(path), wild.BATCH
    if form.startswith(("builder", "optimum")):
        spec += f"@{next(iter(pytree.tree_leaves(model[1:]))).shape[-1]}"
    if form == "optimum" and next(iter(pytree.tree_leaves(model[1:]))).dim() == 4:
        spec += ",num_channels=3"
    if form.startswith("builder"):
        spec += f",past_sequence_length=0,kv_cache_dim={LARGER['head_dim']}"
    return read(name, form, path, spec, batch, capture(*model))


def read(
    name: str, form: str, path: Path, spec: str, batch: int, own: Graph | None
) -> dict[str, Any]:
    """What became of one file."""
    made: dict[str, Any] = {"model": name, "form": form}
    start = time.process_time()
    try:
        graph, ended = look(path, spec, batch)
    except PartitaError as error:
        return made | {"refused": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return made | {"crash": f"{error!r} at {where.filename}:{where.lineno}"}
    made |= ended
    made["cpu_s"] = round(time.process_time() - start, 1)
    made["unknown"] = sorted(unknown_kinds(graph))
    made["ops"], made["flops"] = len(graph.ops), total(graph)
    if own is not None:
        made["flops_ratio"] = round(total(graph) / max(total(own), 1), 4)
        made["products_ratio"] = round(products(graph) / max(products(own), 1), 4)
        made["held_ratio"] = round(held(graph) / max(held(own), 1), 4)
    return made


def main() -> None:
    """Write and read the files asked for and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="package:model, or FILE.onnx")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--keep", type=Path, help="where the files are left")
    parser.add_argument("--lines", type=Path, help="a line for each file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wild.SMALL.update(LARGER)
    names = options.names or MODELS
    for package in sorted({n.partition(":")[0] for n in names if not n.endswith(".onnx")}):
        wild.import_package(package)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name.partition("@")[0].endswith(".onnx"):
                path = Path(name.partition("@")[0])
                rows = [read(path.name, "file", folder / path.name, name, wild.BATCH, None)]
            else:
                rows = [row(name, form, folder) for form in options.forms.split(",")]
            for each in rows:
                print(json.dumps(each), flush=True)
                if options.lines is not None:
                    with options.lines.open("a") as stream:
                        stream.write(json.dumps(each) + "\n")


if __name__ == "__main__":
    main()
