"""What an emitted module needs beside its stages: imports, and what its checkpoints run in."""

from collections.abc import Iterable, Sequence

_COUNTED_ONCE = '''

class CountedOnce:
    """What `checkpoint` runs in: a second run leaves the buffers of a module as they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> tuple[object, object]:
        """For the first run, and for the second."""
        return contextlib.nullcontext(), self._put_back()

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        before = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)'''

_ONE_MODE = '''

class {name}(nn.Module):
    """A stage of the model in {mode} mode; in the other the model may compute something else."""

    def train(self, mode: bool = True) -> "{name}":
        """Refuse the other mode, which these stages were not made for."""
        if mode is not {training}:
            raise RuntimeError("these stages are the model in {mode} mode; emit the other, too")
        super().train(mode)
        return self'''

_RUN_AGAIN = '''

class RunAgain(threading.local):
    """What is made in `with RUN_AGAIN` is made again in the backward; all else is kept."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False

    def contexts(self) -> tuple[object, object]:
        """What `checkpoint` runs in: the first time, and the second."""
        return create_selective_checkpoint_contexts(self._policy)

    def _policy(self, _: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        again = self.on or op.is_view
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


RUN_AGAIN = RunAgain()'''


def stage_base(training: bool) -> str:
    """What the class is called that stages of a mode derive from."""
    return "TrainingStage" if training else "EvalStage"


def helpers(body: Sequence[str], training: bool) -> list[str]:
    """What the classes use that is not PyTorch's."""
    base, mode = stage_base(training), "training" if training else "eval"
    one_mode = _ONE_MODE.format(name=base, mode=mode, training=training)
    known = {"CountedOnce(": _COUNTED_ONCE, "RUN_AGAIN": _RUN_AGAIN, f"({base})": one_mode}
    return [line for word, text in known.items() if _says(body, word) for line in text.split("\n")]


def imports(body: Sequence[str], functions: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The imports that a module's lines ask for, and of custom Functions by module and name."""
    known = {
        "import contextlib": "CountedOnce(",
        "import threading": "RUN_AGAIN",
        "from collections.abc import Iterator": "CountedOnce(",
        "from typing import Any": "RUN_AGAIN",
    }
    own = [line for line, word in known.items() if _says(body, word)]
    imports = ["import torch"]
    imports.append("from torch import Tensor, nn")
    if _says(body, "RUN_AGAIN"):
        names = ("CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts")
        imports += ["from torch.utils.checkpoint import (", *(f"    {n}," for n in names), ")"]
    elif _says(body, "checkpoint("):
        imports.append("from torch.utils.checkpoint import checkpoint")
    own_imports = [f"from {module} import {name}" for module, name in functions]
    imports += ["", "# isort: split", *own_imports] if own_imports else []
    imports += ["", "F = nn.functional"] if _says(body, "F.") else []  # no linter's rule minds it
    return [*own, "", *imports] if own else imports


def _says(body: Sequence[str], word: str) -> bool:
    return any(word in line for line in body)
