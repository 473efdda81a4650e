"""Keras models written as ONNX files by tf2onnx, for `onnx_exports.py FILE.onnx` to read.

    python benchmarks/onnx_keras.py FOLDER

Needs tensorflow and tf2onnx, in an environment of their own. A file is written for each model that
tf2onnx takes; the last three say what the others came to.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
APPLICATIONS = ("MobileNetV3Small", "EfficientNetB0", "ConvNeXtTiny")


def models(keras: Any) -> dict[str, Any]:
    """Small models of the usual layers, and three that others built."""
    layers = keras.layers
    image, text, row = layers.Input((64, 64, 3)), layers.Input((16, 32)), layers.Input((12, 8))
    ids = layers.Input((12,), dtype="int32")
    x = layers.Conv2D(16, 3, 2, padding="same", activation="relu")(image)
    x = layers.DepthwiseConv2D(3, padding="same")(layers.BatchNormalization()(x))
    x = layers.MaxPool2D()(layers.SeparableConv2D(32, 3, activation="swish")(x))
    y = layers.LayerNormalization()(text + layers.MultiHeadAttention(4, 8)(text, text))
    y = layers.LayerNormalization()(y + layers.Dense(32)(layers.Dense(64, activation="relu")(y)))
    z = layers.Dense(32)(text + layers.GroupQueryAttention(8, 4, 2)(text, text))
    w = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(row)
    v = layers.Conv1D(16, 3, padding="causal")(layers.Embedding(99, 16)(ids))
    made = {
        "cnn": keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))),
        "attn": keras.Model(text, y),
        "gqa": keras.Model(text, z),
        "lstm": keras.Model(row, layers.Dense(3)(layers.GRU(8)(w))),
        "text": keras.Model(ids, layers.Dense(3)(layers.GlobalMaxPooling1D()(v))),
        "loop": keras.Model(row, layers.Dense(3)(layers.RNN(layers.SimpleRNNCell(16))(row))),
    }
    for name in APPLICATIONS:
        build = getattr(keras.applications, name)
        made[name] = build(weights=None, input_shape=(96, 96, 3))
    return made


def main() -> None:
    """Write every model into the folder."""
    keras, tensorflow, convert = map(
        importlib.import_module, ("keras", "tensorflow", "tf2onnx.convert")
    )
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models(keras).items():
        given = model.inputs[0]
        signature = [tensorflow.TensorSpec(given.shape, given.dtype, name="x")]
        function = tensorflow.function(lambda x, m=model: m(x, training=False), signature)
        path = folder / f"{name}.onnx"
        try:
            convert.from_function(function, signature, opset=17, output_path=str(path))
        except Exception as error:
            print(name, "is not written:", error)
            continue
        print(name, model.count_params(), "parameters", flush=True)


if __name__ == "__main__":
    main()
