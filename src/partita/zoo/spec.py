"""From what a user types to a graph: `gpt2`, `inception_v3@299`, `config.json@4096`, `graph.txt`.

A name may be written with `-` or `_` and in capitals. After `@` stands the image size or the
sequence length; `llama-7b@1+4095` is one token of a decoder behind 4,095 that were read before,
whose keys and values are in a cache. A path ending in .json or .txt (or a folder with a config.json
in it) is a saved graph or a Hugging Face configuration. Everything that can be wrong is an
`InputError` naming it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import GraphError, InputError, ModelError
from partita.files import decode_config, read_bytes
from partita.graph.record import FLOATS, Graph
from partita.suggest import suggest
from partita.zoo.catalogue import ALIASES, MODELS
from partita.zoo.model import ZooModel

FILE_SUFFIXES = (".json", ".txt")
MAX_CHOICE = 2**31
MAX_PARTS = 1024  # of what is repeated: every layer or node makes ops
REPEATED = ("layers", "encoder_layers", "decoder_layers", "nodes")


def build(
    spec: str, batch: int | None = None, dtype: str | None = None, loss: bool = True, **options: Any
) -> Graph:
    """The forward graph that `spec` names, ending in a loss or (`loss=False`) in its outputs."""
    path = _file(spec)
    if path is not None:
        return _from_file(*path, batch, dtype, loss, options)
    name, _, value = spec.partition("@")
    model = find(name)
    chosen = _with_value(spec, model.option, value if "@" in spec else None, options)
    _check(model.name, model.options(), chosen)
    chosen |= _common(model.name, batch, dtype)
    return _built(model.name, model, {**chosen, "loss": loss})


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What a spec names, before anything is built: an entry of the zoo, or a configuration."""

    name: str
    model: ZooModel | None
    config: dict[str, Any] | None
    value: int | None  # what stands after the `@`


def named(spec: str) -> NamedModel:
    """The entry or the Hugging Face configuration that `spec` names; graphs are refused."""
    file = _file(spec)
    if file is None:
        name, at, value = spec.partition("@")
        model = find(name)
        number = _number(_without_cache(value, spec), spec, model.option) if at else None
        if number is not None:
            _check(model.name, model.options(), {model.option: number})
        return NamedModel(model.name, model, None, number)
    path, value_text = file
    config = {} if path.suffix == ".txt" else decode_config(read_bytes(path), str(path))
    if "model_type" not in config:
        raise ModelError(
            "is a graph, not a name or a Hugging Face config.json",
            fix="name a model whose layers are known",
            file=str(path),
        )
    number = None if value_text is None else _number(_without_cache(value_text, spec), spec, "seq")
    if number is not None:
        _check(str(path), {"seq": 1}, {"seq": number})
    return NamedModel(_config_name(path), None, config, number)


def find(name: str) -> ZooModel:
    """The entry of that name or alias; what was probably meant if there is none."""
    wanted = _plain(name)
    known = {_plain(candidate): MODELS[target] for candidate, target in ALIASES.items()}
    known |= {_plain(candidate): model for candidate, model in MODELS.items()}
    if wanted in known:
        return known[wanted]
    near = suggest(name, known, {candidate: model.name for candidate, model in known.items()})
    raise ModelError(f"there is no model {_shown(name)}", fix=f"{near} (partita models lists all)")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def names_file(spec: str) -> bool:
    """Is a file meant (a saved graph or a configuration), and not a model of the zoo?"""
    return _file(spec) is not None


def assumed_lengths(spec: str) -> tuple[int, int] | None:
    """The length that a configuration is built with, and the longest it has; None if no text is.

    What cannot be read is said by whoever builds it.
    """
    from partita.zoo import hf

    path = _file(spec)
    if path is None or path[0].suffix != ".json" or not path[0].is_file():
        return None
    try:
        config = decode_config(read_bytes(path[0]), str(path[0]))
        return hf.lengths(config) if isinstance(config, dict) and "model_type" in config else None
    except InputError:
        return None


def _file(spec: str) -> tuple[Path, str | None] | None:
    """The file that is meant and what stands after its `@`; None if a name of the zoo is."""
    before, at, after = spec.rpartition("@")
    if spec.endswith(FILE_SUFFIXES):
        return Path(spec), None
    if before.endswith(FILE_SUFFIXES):
        return Path(before), after
    if "/" not in spec:
        return None
    if Path(spec).is_file():
        raise ModelError(
            "is no model that is read", file=spec,
            fix="give a config.json, a saved graph (.json, .txt), an .onnx file, file.py:function",
        )  # fmt: skip
    if at and "/" not in after and not Path(spec).is_dir():
        return Path(before) / "config.json", after
    return Path(spec) / "config.json", None


def _from_file(
    path: Path, value: str | None, batch: int | None, dtype: str | None, loss: bool,
    options: dict[str, Any],
) -> Graph:  # fmt: skip
    saved = path.suffix == ".txt"
    config: dict[str, Any] = {}
    if not saved:
        config = decode_config(read_bytes(path), str(path))
        saved = "model_type" not in config
        if saved and "format" not in config:
            raise ModelError(
                'has neither "format" (a saved graph) nor "model_type" (a Hugging Face config)',
                fix="give one of the two, or a name that `partita models` lists",
                file=str(path),
            )
    if saved:
        from partita.graph.files import read_graph

        given = [*options, *(["@"] if value is not None else [])]
        given += [n for n, v in (("batch", batch), ("dtype", dtype)) if v is not None]
        if given:
            raise ModelError(
                f"is a saved graph, whose {', '.join(given)} cannot be chosen",
                fix="build it anew, or leave that out",
                file=str(path),
            )
        return read_graph(path)
    from partita.zoo import hf

    chosen = _with_value(str(path), "seq", value, options)
    _check(str(path), hf.OPTIONS, chosen)
    chosen |= _common(str(path), batch, dtype)
    try:
        return hf.build_config(config, _config_name(path), loss=loss, **chosen)
    except InputError as error:
        raise ModelError(error.found, fix=error.fix, field=error.field, file=str(path)) from None


def _config_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _with_value(
    spec: str, option: str, value: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options with what stands after the `@` among them."""
    if value is None:
        return dict(options)
    new, plus, cached = value.partition("+")
    given = {option: _number(new, spec, option)}
    if plus:
        given["cache"] = _number(cached, spec, "cache")
    for name in given:
        if name in options:
            raise ModelError(f"gives {name} twice", fix="give it once", field=spec)
    return {**options, **given}


def _without_cache(value: str, spec: str) -> str:
    if "+" in value:
        raise ModelError(
            "is one step of a decoder with a cache; what is asked is about training",
            fix="leave the + and what follows out",
            field=spec,
        )
    return value


def _number(text: str, spec: str, option: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise ModelError(
            f"{option} {_shown(text)} after the @",
            fix="a whole number is needed, like 512",
            field=spec if len(spec) <= 80 else spec[:77] + "...",
        )
    return int(text)


def _check(name: str, known: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Every choice is one that the model has, of the type of its default and within reason."""
    for option, value in chosen.items():
        if option not in known:
            raise ModelError(
                f"has no option {_shown(option)}",
                fix=f"it has {', '.join(known)}",
                field=name,
            )
        default = known[option]
        if isinstance(default, bool):
            good, needed = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            least = 0 if option in ("seed", "cache") else 1
            most = MAX_PARTS if option in REPEATED else MAX_CHOICE
            good = type(value) is int and least <= value <= most
            needed = f"a whole number from {least} to {most}"
        elif isinstance(default, tuple):
            good = isinstance(value, tuple) and 0 < len(value) <= 8
            good = good and all(type(item) is int and 0 < item <= 128 for item in value)
            needed = "up to eight whole numbers from 1 to 128"
        else:
            good, needed = isinstance(value, type(default)), f"{type(default).__name__}"
        if not good:
            raise ModelError(f"{option} is {_shown(str(value))}", fix=f"give {needed}", field=name)


def _common(name: str, batch: int | None, dtype: str | None) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if batch is not None:
        _check(name, {"batch": 1}, {"batch": batch})
        chosen["batch"] = batch
    if dtype is not None:
        if dtype not in FLOATS:
            raise ModelError(
                f"dtype is {_shown(str(dtype))}", fix=f"use one of {', '.join(FLOATS)}", field=name
            )
        chosen["dtype"] = dtype
    return chosen


def _built(name: str, model: ZooModel, chosen: dict[str, Any]) -> Graph:
    try:
        return model.build(**chosen)
    except GraphError as error:
        value = chosen.get(model.option, model.default)
        raise ModelError(
            f"cannot be built with {model.option} {value}: "
            f"{': '.join(part for part in (error.field, error.found) if part)}",
            fix=f"choose another {model.option} (the default is {model.default})",
            field=name,
        ) from None
