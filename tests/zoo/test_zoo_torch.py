"""Models of the zoo beside PyTorch modules of the same kind: parameters, shapes and operations."""

import pytest
from zoo_graphs import graph_of

from partita.graph.work import flops
from partita.zoo import build
from partita.zoo.figures import contraction_flops

torch = pytest.importorskip("torch")
nn = torch.nn


def shapes(module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def parameters(graph, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {
        tensor.name.removeprefix(prefix): tensor.shape
        for tensor in graph.parameters
        if tensor.name.startswith(prefix)
    }


def counted(module, *inputs) -> int:
    """Operations of one call as PyTorch's own counter sees them, without computing anything."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return counter.get_total_flops()


def torch_alexnet():
    """AlexNet as in Krizhevsky 2014, in PyTorch's own modules."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2),
        ),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Sequential(
            nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096),
            nn.ReLU(), nn.Linear(4096, 1000),
        ),
    )  # fmt: skip


def test_alexnet_has_the_parameters_and_operations_of_its_twin():
    with torch.device("meta"):
        reference, image = torch_alexnet(), torch.empty(4, 3, 224, 224)
    graph = build("alexnet", batch=4)
    names = {"0.": "features.", "3.": "classifier."}
    renamed = {names[name[:2]] + name[2:]: shape for name, shape in shapes(reference).items()}
    assert parameters(graph) == renamed
    assert contraction_flops(graph) == counted(reference, image)


def test_the_lstm_stack_is_torchs():
    with torch.device("meta"):
        reference = nn.LSTM(256, 256, num_layers=10)
    expected = {}
    for name, shape in shapes(reference).items():
        kind, _, layer = name.rpartition("_l")
        expected[f"lstm.{layer}.{kind}"] = shape
    assert parameters(graph_of("lstm")) == expected


def test_a_bidirectional_layer_holds_both_directions_of_torchs():
    with torch.device("meta"):
        reference = nn.LSTM(1312, 1024, bidirectional=True)
    own = parameters(graph_of("deepspeech2"), "rnns.0.rnn.")
    assert own["weight_ih"] == (2 * reference.weight_ih_l0.shape[0], 1312)
    assert sum(map(torch.Size.numel, map(torch.Size, own.values()))) == sum(
        parameter.numel() for parameter in reference.parameters()
    )


def test_a_gru_layer_has_torchs_parameters():
    with torch.device("meta"):
        reference = nn.GRU(1312, 256)
    graph = build("deepspeech2", batch=1, cell="gru", hidden=256, layers=1, bidirectional=False)
    own = parameters(graph, "rnns.0.rnn.")
    assert own == {name.removesuffix("_l0"): shape for name, shape in shapes(reference).items()}


@pytest.mark.parametrize(
    ("name", "prefix", "width", "heads", "inner"),
    [
        ("bert-base", "bert.encoder.layer.0.", 768, 12, 3072),
        ("gpt2", "h.0.", 768, 12, 3072),
        ("vit-b16", "encoder.layers.encoder_layer_0.", 768, 12, 3072),
        ("vit-h14", "encoder.layers.encoder_layer_31.", 1280, 16, 5120),
    ],
)
def test_a_block_has_as_many_parameters_as_torchs_encoder_layer(name, prefix, width, heads, inner):
    with torch.device("meta"):
        reference = nn.TransformerEncoderLayer(width, heads, inner)
    outcome = sum(
        torch.Size(shape).numel() for shape in parameters(graph_of(name), prefix).values()
    )
    assert outcome == sum(parameter.numel() for parameter in reference.parameters())


def test_a_vision_transformer_block_works_as_much_as_torchs():
    with torch.device("meta"):
        reference = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
        x = torch.empty(2, 197, 768)
    graph = build("vit-b16", batch=2, fused_attention=False)
    twelve = contraction_flops(graph) - 2 * 2 * (196 * 768 * 768 + 768 * 1000)
    assert twelve / 12 == counted(reference.train(), x)


def test_a_grouped_bottleneck_has_torchs_parameters_and_operations():
    with torch.device("meta"):
        reference = nn.Sequential(
            nn.Conv2d(512, 256, 1, bias=False), nn.BatchNorm2d(256),
            nn.Conv2d(256, 256, 3, 1, 1, groups=32, bias=False), nn.BatchNorm2d(256),
            nn.Conv2d(256, 512, 1, bias=False), nn.BatchNorm2d(512),
        )  # fmt: skip
        x = torch.empty(2, 512, 28, 28)
    graph = graph_of("resnext50", times=2)
    own = parameters(graph, "layer2.1.")
    assert list(own.values()) == list(shapes(reference).values())
    convolutions = [op for op in graph.ops if op.scope == "layer2.1" and op.kind == "conv"]
    assert sum(flops(graph.call(op)) for op in convolutions) == counted(reference, x)


def test_up_convolution_has_torchs_shape():
    with torch.device("meta"):
        reference = nn.ConvTranspose2d(1024, 512, 2, 2)
        shape = tuple(reference(torch.empty(1, 1024, 28, 28)).shape)
    graph = graph_of("unet")
    assert graph.tensor("up3.upsample").shape == shape
    assert parameters(graph, "up3.upsample.") == shapes(reference)
