"""Watching a model while it is exported, for what `torch.export` would lose without a word.

- a custom `torch.autograd.Function`: only its forward would be kept, its backward replaced by the
  derivative of that. It becomes an operator (`functions.py`), and is refused where it cannot;
- `torch.utils.checkpoint`: the region would be kept without the recomputation (and with
  `use_reentrant=True` without its gradient). It is refused, left to whoever plans (`inline`), or
  its nodes are marked (`keep`);
- `Tensor.register_hook` and backward hooks of modules: they change gradients, and would be dropped;
- `torch.no_grad()` within a `torch.autocast` region: the former would be lost (not the other way
  round);
- tensors that a module keeps in attributes from call to call: export would forget them;
- modules put into a module while it runs: the next call would be another program;
- packed sequences, gradients taken within `forward`: export fails on them, but somewhere else;
- Python's and numpy's random numbers: the value drawn now would be used for ever;
- files and connections that are opened: what they give now would be used for ever. That is said.

Most raise `CaptureError` from where they happen, so that the line is known. What a bound method has
been taken of before (`apply = MyFunction.apply`) is seen as well, because the names replaced here
are those that PyTorch's own code looks up when it is called.
"""

import builtins
import contextlib
import itertools
import logging
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from partita.capture import lines
from partita.capture.attributes import AskedModule, kept_attributes
from partita.capture.checks import passing_checks
from partita.capture.functions import NotCarried, carried, is_own_apply
from partita.capture.of_call import decided_constants
from partita.errors import CaptureError

CHECKPOINTING = "refuse", "inline", "keep"
# What a model may ask of torch.compiler. Some go another way where they are exported, with other
# roundings; that some are compiled lets them leave out what depends on values.
USUAL, PLAIN = ("is_exporting",), ("is_compiling", "is_dynamo_compiling", "is_exporting")
REGION = "partita checkpoint"  # the mark on nodes of a checkpointed region
DRAWS = ("random", "uniform", "randint", "randrange", "choice", "choices", "sample", "shuffle",
         "gauss", "normal", "rand", "randn", "permutation", "beta", "binomial")  # fmt: skip
log = logging.getLogger("partita")


@contextlib.contextmanager
def watching(
    module: torch.nn.Module, checkpointing: str, carries: bool = True,
    denied: Sequence[str] = USUAL, bytecode: bool = False,
    changed: list[str] | None = None, asked: AskedModule | None = None,
) -> Iterator[None]:  # fmt: skip
    """Raise `CaptureError` at the line of the model that does what would be lost.

    `carries`: may a custom Function become an operator? `denied`: which questions whether it is
    compiled or exported does the model get no to? `bytecode`: is its bytecode read (strict export)?
    That knows less of what is put in the place of PyTorch's own, and the model has been run before.
    `changed` gets the names of what the call has changed in the module, tensors aside, `asked` what
    the module was asked.
    """
    if checkpointing not in CHECKPOINTING:
        raise CaptureError(
            f"checkpointing is {checkpointing!r}", fix=f"use one of {', '.join(CHECKPOINTING)}"
        )
    _refuse_hooks(module)
    before = _random_states()
    refused: list[CaptureError] = []
    drawn: list[lines.SourceLine] = []
    with (
        _blamed_gradients(),
        _noted_draws(drawn),
        _said_reads(),
        _replaced(refused),
        _checkpoints(refused, checkpointing),
        _functions(refused, carries),
        kept_attributes(module, refused, reads=not bytecode, changed=changed, asked=asked),
        _noted_grad_mode(asked),
        _detached_data(refused),
        _said_padding(),
        _decided_draws(refused),
        contextlib.nullcontext() if bytecode else _bounded_counts(),
        contextlib.nullcontext() if bytecode else decided_constants(),
        contextlib.nullcontext() if bytecode else passing_checks(),
        _plain_run(denied, asked),
    ):
        yield
    if refused:  # the model caught our error itself
        raise refused[0]
    if _random_states() != before:
        line = drawn[0] if drawn else lines.SourceLine()
        who = f"`{line.code}`" if drawn else "the model"
        raise CaptureError(
            f"{who} draws random numbers with Python's random module or numpy, "
            "and the captured graph would keep those drawn now",
            fix="draw them with torch, or pass what depends on them as an argument",
            file=line.place,
        )


@contextlib.contextmanager
def deciding() -> Iterator[None]:
    """What is decided about values while a module is followed, for a call that is not followed."""
    refused: list[CaptureError] = []
    with _decided_draws(refused), _bounded_counts(), passing_checks(says=False):
        yield


@contextlib.contextmanager
def _checkpoints(refused: list[CaptureError], checkpointing: str) -> Iterator[None]:
    """What becomes of regions under `torch.utils.checkpoint`."""
    said: set[str] = set()
    regions = itertools.count()

    def on_checkpoint(*args: Any, **kwargs: Any) -> Any:
        line = lines.of_stack()
        error = CaptureError(
            f"`{line.code}` uses activation checkpointing, which would be dropped",
            fix='pass checkpointing="keep" to have it kept, "inline" to have the plan choose what '
            "to recompute, or switch it off in the model",
            file=line.place,
        )
        refused.append(error)
        raise error

    def note() -> None:
        line = lines.of_stack()
        if checkpointing == "inline" and line.place not in said:
            said.add(line.place)
            log.warning("%s: the plan chooses what is recomputed, not `%s`", line.place, line.code)

    def region(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        note()
        marks = {REGION: next(regions)} if checkpointing == "keep" else {}
        with torch.fx.traceback.annotate(marks):
            yield

    class Inlined:
        """Stands for the reentrant checkpoint: its forward would run without gradients."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            for _ in region(function):
                made = function(*args)
            return made

    marking = torch.fx.traceback.preserve_node_meta() if checkpointing == "keep" else None
    with contextlib.ExitStack() as stack, marking or contextlib.nullcontext():
        put = _putting(stack)
        if checkpointing == "refuse":
            put(checkpoints, "_checkpoint_without_reentrant_generator", on_checkpoint)
            put(checkpoints, "CheckpointFunction", _Refusing(on_checkpoint))
        else:
            put(checkpoints, "_checkpoint_without_reentrant_generator", region)
            put(checkpoints, "CheckpointFunction", Inlined)
        yield


@contextlib.contextmanager
def _replaced(refused: list[CaptureError]) -> Iterator[None]:
    def refuse(wrong: str, fix: str) -> None:
        line = lines.of_stack()
        error = CaptureError(f"`{line.code}` {wrong}", fix=fix, file=line.place)
        refused.append(error)
        raise error

    def on_hook(tensor: Any, hook: Any) -> Any:
        refuse(
            "registers a hook on a tensor's gradient, which would be lost",
            "change the gradient by an operation of the model instead",
        )

    def on_packed(*args: Any, **kwargs: Any) -> Any:
        refuse(
            "works on a packed sequence, whose shape depends on the data",
            "give the padded batch to the recurrent layer and mask what is padding",
        )

    def on_grad_mode(self: Any, mode: bool) -> None:
        within = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        if not mode and within and lines.is_called_by_user(sys._getframe(1)):
            refuse(
                "switches gradients off within an autocast region, which would be lost",
                "open the no_grad region around the autocast region, or use .detach()",
            )
        set_grad_mode(self, mode)

    set_grad_mode = torch.set_grad_enabled.__init__
    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        put(torch.Tensor, "register_hook", on_hook)
        put(torch.set_grad_enabled, "__init__", on_grad_mode)
        put(torch.nn.utils.rnn, "_packed_sequence_init_args", on_packed)
        yield


@contextlib.contextmanager
def _functions(refused: list[CaptureError], carries: bool) -> Iterator[None]:
    """A custom Function becomes an operator of the program."""
    base = torch.autograd.function._SingleLevelFunction  # where `Function.apply` looks further

    def on_apply(cls: Any, *args: Any) -> Any:
        apply = super(base, cls).apply
        if is_own_apply() or cls.__module__.startswith("torch."):
            return apply(*args)
        reason = "is called where nobody can watch"
        if carries:
            try:
                return carried(cls, args, apply)
            except NotCarried as error:
                reason = str(error)
        line = lines.of_stack()
        refusal = CaptureError(
            f"`{line.code}` calls the custom autograd.Function {cls.__name__}, whose backward "
            f"would be lost: it {reason}",
            fix="let it take and give tensors, and change none of them, "
            "or keep it outside the captured module",
            file=line.place,
        )
        refused.append(refusal)
        raise refusal

    base.apply = classmethod(on_apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del base.apply  # type: ignore[attr-defined]


@contextlib.contextmanager
def _decided_draws(refused: list[CaptureError]) -> Iterator[None]:
    """`if torch.rand([]) < p` is decided where p leaves no choice: 0, as LayerDrop has it, or 1.

    The number is drawn all the same, so that what is drawn after it is the same. Any other p is
    refused where the model asks.
    """
    drawn: dict[int, torch.Tensor] = {}  # single numbers of [0, 1), by id
    chances: dict[int, torch.Tensor] = {}  # comparisons of them

    def on_rand(*args: Any, **kwargs: Any) -> torch.Tensor:
        number = rand(*args, **kwargs)
        if number.dim() == 0:
            drawn[id(number)] = number
        return number

    def comparing(compare: Callable[..., Any], below: bool) -> Callable[..., Any]:
        def on_compare(self: torch.Tensor, other: Any) -> Any:
            if id(self) in drawn and isinstance(other, int | float):
                if other >= 1:
                    return below
                if other <= 0 and not (other == 0 and compare is less_or_equal):
                    return not below
                chance = compare(self, other)
                chances[id(chance)] = chance
                return chance
            return compare(self, other)

        return on_compare

    def on_truth(self: torch.Tensor) -> bool:
        if id(self) not in chances:
            return truth(self)
        line = lines.of_stack()
        error = CaptureError(
            f"`{line.code}` chooses by chance what is computed, anew in every call",
            fix="compute it in any case and choose with torch.where("
            "torch.rand([], device=x.device) < p, x, layer(x)), or set the rate to 0 "
            "(config.layerdrop = 0.0)",
            file=line.place,
        )
        refused.append(error)
        raise error

    rand, less_or_equal = torch.rand, torch.Tensor.__le__
    truth = torch.Tensor.__bool__
    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        put(torch, "rand", on_rand)
        put(torch.Tensor, "__lt__", comparing(torch.Tensor.__lt__, below=True))
        put(torch.Tensor, "__le__", comparing(less_or_equal, below=True))
        put(torch.Tensor, "__ge__", comparing(torch.Tensor.__ge__, below=False))
        put(torch.Tensor, "__bool__", on_truth)
        yield


@contextlib.contextmanager
def _noted_draws(drawn: list[lines.SourceLine]) -> Iterator[None]:
    """Lines that draw with Python's or numpy's generators, as far as they look them up there."""

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def on_draw(*args: Any, **kwargs: Any) -> Any:
            if lines.is_called_by_user(sys._getframe(1)):
                drawn.append(lines.of_stack())
            return draw(*args, **kwargs)

        return on_draw

    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        for home in (random, getattr(sys.modules.get("numpy"), "random", None)):
            for name in DRAWS:
                if hasattr(home, name):
                    put(home, name, noting(getattr(home, name)))
        yield


@contextlib.contextmanager
def _noted_grad_mode(asked: AskedModule | None) -> Iterator[None]:
    """Note that the model asks whether gradients are recorded."""

    def on_ask() -> bool:
        if asked is not None and lines.is_called_by_user(sys._getframe(1)):
            asked.gradients = True
        return is_grad_enabled()

    is_grad_enabled = torch.is_grad_enabled
    with contextlib.ExitStack() as stack:
        _putting(stack)(torch, "is_grad_enabled", on_ask)
        yield


@contextlib.contextmanager
def _detached_data(refused: list[CaptureError]) -> Iterator[None]:
    """`x.data` in the model's code is `x.detach()`, which can be followed.

    Other numbers for x (`x.data = y`) cannot, and are refused.
    """

    def get(self: torch.Tensor) -> torch.Tensor:
        if not lines.is_called_by_user(sys._getframe(1)):
            made: torch.Tensor = plain.__get__(self)
            return made
        return self.detach()

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if lines.is_called_by_user(sys._getframe(1)):
            line = lines.of_stack()
            error = CaptureError(
                f"`{line.code}` gives a tensor other numbers by its .data, which would be lost",
                fix="change it in place (buffer.copy_(y.detach())), or set the attribute",
                file=line.place,
            )
            refused.append(error)
            raise error
        plain.__set__(self, value)

    plain: Any = torch._C.TensorBase.data
    cls: Any = torch.Tensor
    cls.data = property(get, put)
    try:
        yield
    finally:
        del cls.data


@contextlib.contextmanager
def _said_padding() -> Iterator[None]:
    """Say where PyTorch would give zeros for what is padding, if no gradients were recorded."""

    def on_encode(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
                  is_causal: bool | None = None) -> Any:  # fmt: skip
        if src_key_padding_mask is not None and not self.training and self.use_nested_tensor:
            line = lines.of_stack()
            log.warning(
                "%s: `%s` gives zeros for padding where no gradients are recorded; captured, it "
                "gives what it gives where they are: pass enable_nested_tensor=False to "
                "nn.TransformerEncoder to have it always so", line.place, line.code,
            )  # fmt: skip
        return encode(self, src, mask, src_key_padding_mask, is_causal)

    encode = torch.nn.TransformerEncoder.forward
    with contextlib.ExitStack() as stack:
        _putting(stack)(torch.nn.TransformerEncoder, "forward", on_encode)
        yield


@contextlib.contextmanager
def _said_reads() -> Iterator[None]:
    """Say which lines of the model open a file or a connection."""
    said: set[str] = set()

    def saying(what: str, opens: Callable[..., Any]) -> Callable[..., Any]:
        def on_open(*args: Any, **kwargs: Any) -> Any:
            line = lines.behind_library(sys._getframe(1))
            if line.file and line.place not in said:
                said.add(line.place)
                log.warning(
                    "%s: `%s` opens %s; captured, what it gives stays as it is now, and nothing is "
                    "written later", line.place, line.code, what,
                )  # fmt: skip
            return opens(*args, **kwargs)

        return on_open

    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        put(builtins, "open", saying("a file", builtins.open))
        put(socket, "create_connection", saying("a connection", socket.create_connection))
        yield


GRADIENTS = (
    (torch.autograd, "grad"), (torch.autograd, "backward"), (torch.func, "grad"),
    (torch.func, "grad_and_value"), (torch.func, "vjp"), (torch.func, "jvp"),
    (torch.func, "jacrev"), (torch.func, "jacfwd"), (torch.func, "hessian"),
)  # fmt: skip


@contextlib.contextmanager
def _blamed_gradients() -> Iterator[None]:
    """Where following a model fails somewhere else, the line that took a gradient is to blame."""
    taken: list[lines.SourceLine] = []

    def noting(take: Callable[..., Any]) -> Callable[..., Any]:
        def on_take(*args: Any, **kwargs: Any) -> Any:
            if lines.is_called_by_user(sys._getframe(1)):
                taken.append(lines.of_stack())
            return take(*args, **kwargs)

        return on_take

    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        for home, name in GRADIENTS:
            put(home, name, noting(getattr(home, name)))
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            if taken and not lines.of_traceback(error.__traceback__).file:
                lines.blame(error, taken[-1])
            raise


@contextlib.contextmanager
def _plain_run(denied: Sequence[str], asked: AskedModule | None) -> Iterator[None]:
    """The model's own code is told that nobody compiles or exports it; PyTorch's is not."""

    def denying(question: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            own = lines.is_called_by_user(sys._getframe(1))
            if own and asked is not None:
                asked.export = True
            return not own and question()

        return answer

    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        for name in denied:
            put(torch.compiler, name, denying(getattr(torch.compiler, name)))
        yield


@contextlib.contextmanager
def _bounded_counts() -> Iterator[None]:
    """`torch.bincount(x, minlength=n)` gives n numbers, as where nothing in x is n or more.

    That is how losses of routers count tokens per expert. What is more than it should be raises
    when the captured program runs.
    """

    def on_bincount(
        input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        if weights is not None or minlength < 1 or input.dim() != 1:
            return bincount(input, weights, minlength)
        places = input.long()
        zeros = torch.zeros(minlength, dtype=torch.long, device=input.device)
        return zeros.scatter_add(0, places, torch.ones_like(places))

    bincount = torch.bincount
    with contextlib.ExitStack() as stack:
        put = _putting(stack)
        put(torch, "bincount", on_bincount)
        put(torch.Tensor, "bincount", on_bincount)
        yield


def _putting(stack: contextlib.ExitStack) -> Callable[[Any, str, Any], None]:
    def put(where: Any, name: str, value: Any) -> None:
        stack.callback(setattr, where, name, getattr(where, name))
        setattr(where, name, value)

    return put


class _Refusing:
    """Stands for the reentrant checkpoint and refuses it."""

    def __init__(self, refuse: Callable[..., Any]) -> None:
        self.apply = refuse


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def _refuse_hooks(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise CaptureError(
                "has a backward hook, which would be lost",
                fix="remove it before capturing",
                field=f"module {name or type(child).__name__!r}",
            )
