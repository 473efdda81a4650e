"""A user's own model: `file.py:name`.

`name` is a function that gives `(module, args)` or `(module, args, kwargs)`; where it has a
parameter `batch`, it is called with the batch size asked for. Or it is a class of modules that
needs no arguments, beside `example_inputs` in the same file: a tuple, or a function that gives one
(and may take `batch`, too).

    def make(batch=8):
        return MyModel(), (torch.randn(batch, 3, 224, 224),)

The file is run as Python code, with its folder in front of `sys.path`, like any script.
"""

import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from partita.capture.installed import need_torch
from partita.errors import FileError, ModelError
from partita.suggest import suggest

if TYPE_CHECKING:
    from partita.graph.record import Graph

log = logging.getLogger("partita")

EXAMPLE = "example_inputs"
NEEDED = "give (module, args) or (module, args, kwargs)"


def is_python_spec(spec: str) -> bool:
    """Does a MODEL name a Python file?"""
    return spec.endswith(".py") or ".py:" in spec


def python_path(spec: str) -> str:
    """The file in `file.py:name`."""
    return spec.rpartition(":")[0] if ".py:" in spec else spec


def read_module(spec: str, batch: int | None = None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module that `file.py:name` makes, and the arguments of one call."""
    need_torch(f"the model {spec}")
    import torch

    path = python_path(spec)
    name = spec[len(path) + 1 :]
    code = _run(Path(path))
    named = _named(code, path, name)
    with _blamed(path, name):
        if isinstance(named, type) and issubclass(named, torch.nn.Module):
            made = (named(), _examples(code, path, batch))
        else:
            made = _called(named, batch)
    return _checked(made, path, name)


def read_function(spec: str) -> Any:
    """The function that `file.py:name` names."""
    path, _, name = spec.rpartition(":")
    return _named(_run(Path(path)), path, name)


def python_graph(
    spec: str, batch: int | None = None, dtype: str | None = None, training: bool = True
) -> "Graph":
    """The graph of the model that `file.py:name` makes; in eval mode if it is not to train."""
    module, args, kwargs = read_module(spec, batch)
    from partita.capture import capture

    if not training:
        module.eval()
    graph = capture(module, args, kwargs, checkpointing="inline")
    own = graph.parameters[0].dtype if graph.parameters else None
    if dtype is not None and own is not None and dtype != own:
        module, args, kwargs = _in_dtype(module, args, kwargs, dtype)
        graph = capture(module, args, kwargs, checkpointing="inline")
    return graph


def _in_dtype(module: Any, args: Any, kwargs: Any, dtype: str) -> Any:
    import torch
    from torch.utils import _pytree

    from partita.capture.translate import DTYPES

    wanted = next(key for key, value in DTYPES.items() if value == dtype)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(wanted) if is_float else value

    args, kwargs = _pytree.tree_map(cast, (args, kwargs))
    return module.to(wanted), args, kwargs


class _FromText(SourceFileLoader):
    """Runs what stands in the file: a `__pycache__` beside it may hold other code."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileError("there is no such file", fix="check the name", file=str(path))
    log.info("runs %s", path)
    loader = _FromText(f"partita_model_{path.stem}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code  # classes are looked up in the module they say they are of
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with _blamed(str(path), ""):
            spec.loader.exec_module(code)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return code


def _named(code: ModuleType, path: str, name: str) -> Any:
    own = {
        key: value
        for key, value in vars(code).items()
        if callable(value) and getattr(value, "__module__", "") == code.__name__
    }
    if not name:
        raise ModelError(
            "does not say which function makes the model",
            fix=f"write {path}:NAME; {suggest('', own)}",
            field=path,
        )
    named = getattr(code, name, None)
    if named is None:
        raise ModelError(f"has no {name!r}", fix=suggest(name, own), field=path)
    if not callable(named):
        raise ModelError(f"{name!r} is a {type(named).__name__}", fix="name a function", field=path)
    return named


def _called(function: Any, batch: int | None) -> Any:
    takes_batch = "batch" in inspect.signature(function).parameters
    return function(batch=batch) if takes_batch and batch is not None else function()


def _examples(code: ModuleType, path: str, batch: int | None) -> Any:
    examples = getattr(code, EXAMPLE, None)
    if examples is None:
        raise ModelError(
            f"a class of modules needs {EXAMPLE} beside it, and there is none",
            fix=f"add {EXAMPLE} = (tensor, ...) to the file, or name a function: {NEEDED}",
            field=path,
        )
    return _called(examples, batch) if callable(examples) else examples


def _checked(made: Any, path: str, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch

    where = f"{path}:{name}"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ModelError(f"gives a {type(made).__name__}", fix=NEEDED, field=where)
    module, args, *rest = made
    args = (args,) if isinstance(args, torch.Tensor) else args
    kwargs = rest[0] if rest else {}
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"gives a {type(module).__name__} first", fix=NEEDED, field=where)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise ModelError(
            f"gives a {type(args).__name__} and a {type(kwargs).__name__} as arguments",
            fix=NEEDED,
            field=where,
        )
    return module, tuple(args), kwargs


@contextmanager
def _blamed(path: str, name: str) -> Iterator[None]:
    """An error in the user's file is the user's: say where it stands.

    What it prints is none of what a command gives, and goes where messages do.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == Path(path)
        ]
        line = own[-1].lineno if own else getattr(error, "lineno", None)
        raise ModelError(
            f"{type(error).__name__}: {error}",
            fix="correct the file",
            field=name,
            file=f"{path}:{line}" if line else path,
        ) from error
