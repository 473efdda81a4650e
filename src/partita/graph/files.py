"""Graphs in files: `.json` and `.txt` both ways, `.dot` and `.svg` to look at.

Readers end in `assemble`, which checks what a graph from a file must satisfy beyond being one:
shapes and gradients that fit together. One made by `GraphBuilder` satisfies it by construction.

The text form is a line per tensor that is given and per op.

    graph mlp
    # comments and empty lines are skipped
    input x: f32[32, 784]
    param fc.weight: f32[10, 784]
    fc: f32[32, 10] = linear(x, fc.weight) @head
    a: f32[16, 10], b: f32[16, 10] = split(fc) as halves @head {axis=0, sizes=[16, 16]}
    output a, b

The graph of a captured model, which has not all numbers of its code, says so: `graph mlp captured`.
A parameter that is a part of a stored tensor says so: `param q: f32[8, 8] of "w[8, 24] axis ..."`.
An op line is `outputs = kind(inputs)`, then what is not usual: `as` its name (if it is not that
of its output; `x` for the outputs `x:0`, `x:1`), `@` its module scope, `{}` its attributes. A
backward op is `kind.phase[forward op](...)` and is called `<forward op>.<phase>` unless it says
otherwise. Names that are not plain are quoted as in JSON. The tensors of the graph are in the
order of the text; one that must come before its op has a line `activation x: ...` of its own.

The JSON form is `partita/graph@1`.

    {"format": "partita/graph@1", "name": "mlp",
     "tensors": [{"name": "x", "shape": [32, 784], "role": "input"}, ...],
     "ops": [{"name": "fc", "kind": "linear", "inputs": ["x", "w"], "outputs": ["fc"]}, ...],
     "outputs": ["fc"]}

Left out where usual: `dtype` f32, `role` activation, `phase` forward; `attrs`, `scope`, `forward`
and `source` (of a packed parameter, see `packed.py`) if empty; `captured` unless true. Ops may
stand in any order.
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from partita.errors import FileError, GraphError
from partita.files import (
    check_format,
    convert,
    decode_json,
    encode_json,
    read_bytes,
    write_atomically,
)
from partita.graph.draw import to_dot, to_svg
from partita.graph.record import PHASES, Attr, Call, Graph, Op, Shape, Tensor, topological
from partita.graph.shapes import SHAPES, output_shapes, unknown_kinds

log = logging.getLogger("partita")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DTYPE = re.compile(r"[a-z][a-z0-9]*")
_WHOLE = re.compile(r"-?[0-9]{1,40}(?![0-9])")
_NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,9})?(?![0-9.])")
_SPACE = re.compile(r"[ \t]*")
_AS = re.compile(r"as(?![A-Za-z0-9_])")
_CAPTURED = re.compile(r"captured(?![A-Za-z0-9_])")
_OF = re.compile(r"of(?![A-Za-z0-9_])")
_PHASE = re.compile(r"\.(?:forward|dgrad|wgrad|update)\b")
_SUFFIXES = tuple(f".{phase}" for phase in PHASES)
JSON_VERSION = 1
_Scalar = bool | int | float | str


def assemble(
    name: str, tensors: Iterable[Tensor], ops: Iterable[Op], outputs: Iterable[str], *,
    is_captured: bool = False,
) -> Graph:  # fmt: skip
    """A graph from parts in any order: sorted, checked, and with a warning per unknown kind."""
    known = tuple(tensors)
    given = [tensor.name for tensor in known if tensor.is_given]
    graph = Graph(name, known, topological(ops, given), tuple(outputs), is_captured)
    check_graph(graph)
    for kind in unknown_kinds(graph):
        log.warning(
            "%s has ops of the unknown kind %r: they are not split and cost the bytes they move",
            graph.name or "the graph",
            kind,
        )
    return graph


def check_graph(graph: Graph) -> None:
    """Refuse ops whose tensors do not have the shapes that their kind gives."""
    for op in graph.ops:
        try:
            call = graph.call(op)
            if op.forward:
                _check_gradient(graph, op, call)
            elif op.kind in SHAPES:
                _check_outputs(op, call.outputs, output_shapes(call), f"its {op.kind} gives")
        except GraphError as error:
            raise GraphError(error.found, fix=error.fix, field=f"op {op.name!r}") from None


def _check_gradient(graph: Graph, op: Op, call: Call) -> None:
    if op.kind != call.kind:
        raise GraphError(
            f"of kind {op.kind!r} is a gradient of {op.forward!r} of kind {call.kind!r}",
            fix="give both one kind",
        )
    for name in ("grads", "wrt"):
        positions = op.attr(name)
        if isinstance(positions, tuple) and len(set(positions)) != len(positions):
            raise GraphError(
                f"attribute {name} is {list(positions)}", fix="name each position once"
            )
    needed = tuple(call.inputs[i] for i in call.wrt)
    shapes = tuple(graph.tensor(name).shape for name in op.outputs)
    _check_outputs(op, shapes, needed, f"what it differentiates of {op.forward!r} has")
    gradients = [int(code[1:]) for code in call.reads if code.startswith("g")]
    if len(op.inputs) < len(gradients):
        raise GraphError(
            f"reads {len(op.inputs)} tensors", fix=f"it needs {len(gradients)} gradients first"
        )
    for name, position in zip(op.inputs, gradients, strict=False):
        if graph.tensor(name).shape != call.outputs[position]:
            raise GraphError(
                f"reads {name!r} of {list(graph.tensor(name).shape)}",
                fix=f"a gradient of output {position} has {list(call.outputs[position])}",
            )


def _check_outputs(
    op: Op, shapes: tuple[Shape, ...], needed: tuple[Shape, ...], reason: str
) -> None:
    if len(shapes) != len(needed):
        raise GraphError(
            f"gives {len(shapes)} tensors",
            fix=f"{reason} {len(needed)}: {', '.join(str(list(shape)) for shape in needed)}",
        )
    for name, shape, right in zip(op.outputs, shapes, needed, strict=True):
        if shape != right:
            raise GraphError(f"gives {name!r} of {list(shape)}", fix=f"{reason} {list(right)}")


_FIRST = re.compile(
    r'(?:graph|input|param|state|activation|gradient|output)[ \t]+(?=[A-Za-z0-9_"])'
)

_WORDS = {
    "input": "input",
    "param": "parameter",
    "state": "state",
    "activation": "activation",
    "gradient": "gradient",
}
_WORD_OF = {role: word for word, role in _WORDS.items()}
_RESERVED = frozenset({*_WORDS, "graph", "output"})


def to_text(graph: Graph) -> str:
    """The graph as text; `from_text` gives an equal graph back."""
    lines = [f"graph {_name(graph.name)}{' captured' if graph.is_captured else ''}"]
    lines += _body(graph)
    if graph.outputs:
        lines.append(f"output {', '.join(map(_name, graph.outputs))}")
    return "\n".join(lines) + "\n"


def from_text(text: str, file: str = "") -> Graph:
    """The graph that a text describes; errors name the line."""
    try:
        return _TextReader().read(text)
    except GraphError as error:
        raise (error.within(file) if file else error) from None


def _body(graph: Graph) -> Iterator[str]:
    """Lines of tensors and ops such that tensors are first named in the order of the graph."""
    place = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    done = 0  # so many tensors are declared
    for op in graph.ops:
        fresh = [place[name] for name in op.outputs if place[name] >= done]
        if fresh:
            for tensor in graph.tensors[done : min(fresh)]:
                yield _declaration(tensor)
            done = min(fresh)
            usual = all(graph.tensors[i].role == _usual_role(op.phase) for i in fresh)
            if fresh != list(range(done, done + len(fresh))) or not usual:
                for tensor in graph.tensors[done : max(fresh) + 1]:
                    yield _declaration(tensor)
                done, fresh = max(fresh) + 1, []
            done += len(fresh)
        yield _op_line(graph, op, {graph.tensors[i].name for i in fresh})
    for tensor in graph.tensors[done:]:
        yield _declaration(tensor)


def _usual_role(phase: str) -> str:
    return "gradient" if phase in ("dgrad", "wgrad") else "activation"


def _usual_name(outputs: tuple[str, ...], phase: str, forward: str) -> str:
    """What an op is called unless it says otherwise."""
    if forward:
        return f"{forward}.{phase}"
    if len(outputs) == 1:
        return outputs[0]
    stem = outputs[0].removesuffix(":0")
    return stem if outputs == tuple(f"{stem}:{i}" for i in range(len(outputs))) else ""


def _declaration(tensor: Tensor) -> str:
    source = f" of {_quote(tensor.source)}" if tensor.source else ""
    return f"{_WORD_OF[tensor.role]} {_typed(tensor)}{source}"


def _typed(tensor: Tensor) -> str:
    return f"{_name(tensor.name)}: {tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _op_line(graph: Graph, op: Op, fresh: set[str]) -> str:
    outputs = (_typed(graph.tensor(n)) if n in fresh else _name(n) for n in op.outputs)
    kind = _quote(op.kind) if op.kind.endswith(_SUFFIXES) else _name(op.kind)
    phase = "" if op.phase == "forward" else f".{op.phase}"
    forward = f"[{_name(op.forward)}]" if op.forward else ""
    line = f"{', '.join(outputs)} = {kind}{phase}{forward}({', '.join(map(_name, op.inputs))})"
    if op.name != _usual_name(op.outputs, op.phase, op.forward):
        line += f" as {_name(op.name)}"
    if op.scope:
        line += f" @{_name(op.scope)}"
    if op.attrs:
        line += f" {{{', '.join(f'{_key(key)}={_value(value)}' for key, value in op.attrs)}}}"
    return line


def _name(text: str) -> str:
    return text if _NAME.fullmatch(text) and text not in _RESERVED else _quote(text)


def _key(text: str) -> str:
    return text if _KEY.fullmatch(text) else _quote(text)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _value(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quote(value) if isinstance(value, str) else repr(value)


class _Line:
    """One line being read from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.at = 0
        self.skip()

    def skip(self) -> None:
        """Go past spaces."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def fail(self, expected: str) -> GraphError:
        """The error that something else was expected here."""
        rest = self.text[self.at : self.at + 30]
        wrong = f"found {rest!r}" if rest else "the line ends"
        where = f"line {self.number}, column {self.at + 1}"
        return GraphError(wrong, fix=f"expected {expected}", field=where)

    def ended(self) -> bool:
        """True when nothing is left."""
        return self.at >= len(self.text)

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """What matches here, if anything does."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip()
        return match.group()

    def sees(self, literal: str) -> bool:
        """Take the literal if it stands here."""
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        self.skip()
        return True

    def need(self, literal: str, purpose: str) -> None:
        """The literal must stand here."""
        if not self.sees(literal):
            raise self.fail(f"{literal!r} {purpose}")

    def quoted(self) -> str | None:
        """A text in quotes, if one stands here."""
        start = self.at
        raw = self.match(_QUOTED)
        if raw is None:
            return None
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            self.at = start
            raise self.fail("text in quotes with the escapes of JSON") from None

    def name(self, what: str) -> str:
        """A name, plain or in quotes."""
        name = self.quoted()
        if name is None:
            name = self.match(_NAME)
        if name is None:
            raise self.fail(f"{what} (in quotes if it is not plain)")
        return name

    def names(self, what: str, end: str = "") -> tuple[str, ...]:
        """Names with commas between them, up to `end` or the end of the line."""
        names: list[str] = []
        while not (self.sees(end) if end else self.ended()):
            if names:
                self.need(",", f"or {end!r} after {what}" if end else f"after {what}")
            names.append(self.name(what))
        return tuple(names)

    def type(self) -> tuple[str, tuple[int, ...]]:
        """An element type and sizes: `f32[8, 16]`."""
        dtype = self.match(_DTYPE)
        if dtype is None or not self.sees("["):
            raise self.fail("a type like f32[8, 16]")
        sizes: list[int] = []
        while not self.sees("]"):
            if sizes:
                self.need(",", "or ']' after a size")
            size = self.match(_WHOLE)
            if size is None:
                raise self.fail("a whole number as size")
            sizes.append(int(size))
        return dtype, tuple(sizes)

    def value(self) -> Attr:
        """The value of an attribute."""
        if not self.sees("["):
            return self.scalar()
        items: list[bool | int | float | str] = []
        while not self.sees("]"):
            if items:
                self.need(",", "or ']' in a list")
            items.append(self.scalar())
        return tuple(items)  # type: ignore[return-value]

    def scalar(self) -> bool | int | float | str:
        """A number, a text in quotes, true or false."""
        text = self.quoted()
        if text is not None:
            return text
        word = self.match(_NUMBER)
        if word is not None:
            return float(word) if any(c in ".eE" for c in word) else int(word)
        if self.sees("true"):
            return True
        if self.sees("false"):
            return False
        raise self.fail("a number, a text in quotes, true, false or a list of these")


class _TextReader:
    """What the lines read so far have said."""

    def __init__(self) -> None:
        self.title: str | None = None
        self.is_captured = False
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.outputs: list[str] = []
        self.lines: dict[str, int] = {}  # "op 'x'" or "tensor 'x'" -> its line

    def read(self, text: str) -> Graph:
        """The graph, once all lines are read."""
        for number, raw in enumerate(text.split("\n"), 1):
            line = _Line(number, raw.rstrip())
            if not line.ended() and not line.sees("#"):
                self._line(line)
        if self.title is None:
            raise GraphError("holds no graph", fix="its first line is `graph NAME`", field="line 1")
        try:
            return assemble(
                self.title, self.tensors, self.ops, self.outputs, is_captured=self.is_captured
            )
        except GraphError as error:
            line_number = self.lines.get(error.field)
            where = f"line {line_number}: {error.field}" if line_number else error.field
            raise GraphError(error.found, fix=error.fix, field=where) from None

    def _line(self, line: _Line) -> None:
        start = line.at
        word = (line.match(_FIRST) or "").strip()
        if self.title is None:
            if word != "graph":
                line.at = start
                raise line.fail("`graph NAME` before anything else")
            self.title = line.name("the graph's name")
            self.is_captured = bool(line.match(_CAPTURED))
        elif word in _WORDS:
            name = line.name("the tensor's name")
            line.need(":", "and a type like f32[8, 16]")
            dtype, shape = line.type()
            source = line.name("what it is a part of") if line.match(_OF) else ""
            self._tensor(line, name, dtype, shape, _WORDS[word], source)
        elif word == "output":
            self.outputs += line.names("the name of an output")
        elif word == "graph":
            raise line.fail("one graph in a file, and this is a second")
        else:
            self._op(line)
        if not line.ended():
            raise line.fail("the end of the line")

    def _tensor(
        self, line: _Line, name: str, dtype: str, shape: tuple[int, ...], role: str,
        source: str = "",
    ) -> None:  # fmt: skip
        with _at(line):
            self.tensors.append(Tensor(name, shape, dtype, role, source))
        self.lines.setdefault(f"tensor {name!r}", line.number)

    def _op(self, line: _Line) -> None:
        outputs: list[str] = []
        typed: list[tuple[str, str, tuple[int, ...]]] = []
        while not outputs or not line.sees("="):
            if outputs:
                line.need(",", "or '=' after an output")
            outputs.append(line.name("input, param, state, output or the name of a tensor"))
            if line.sees(":"):
                typed.append((outputs[-1], *line.type()))
        kind, phase = _kind(line)
        forward = ""
        if line.sees("["):
            forward = line.name("the name of the forward op")
            line.need("]", "after the forward op")
        line.need("(", "and the inputs")
        inputs = line.names("the name of an input", ")")
        name = line.name("the name of the op") if line.match(_AS) else None
        scope = line.name("a module scope") if line.sees("@") else ""
        attrs = self._attrs(line) if line.sees("{") else {}
        for entry in typed:
            self._tensor(line, *entry, _usual_role(phase))
        if name is None:
            name = _usual_name(tuple(outputs), phase, forward)
            if not name:
                raise line.fail("`as NAME` for an op with several outputs")
        with _at(line):
            pairs = tuple(sorted(attrs.items()))
            self.ops.append(Op(name, kind, inputs, tuple(outputs), pairs, scope, phase, forward))
        self.lines.setdefault(f"op {name!r}", line.number)

    def _attrs(self, line: _Line) -> dict[str, Attr]:
        attrs: dict[str, Attr] = {}
        while not line.sees("}"):
            if attrs:
                line.need(",", "or '}' after an attribute")
            key = line.quoted()
            if key is None:
                key = line.match(_KEY)
            if key is None:
                raise line.fail("the name of an attribute")
            if key in attrs:
                raise line.fail(f"attribute {key} once")
            line.need("=", "and the attribute's value")
            attrs[key] = line.value()
        return attrs


def _kind(line: _Line) -> tuple[str, str]:
    """The kind of an op and its phase: `linear.dgrad`, or `"my kind".dgrad`."""
    quoted = line.quoted()
    word = line.match(_NAME if quoted is None else _PHASE) or ""
    if quoted is None and not word:
        raise line.fail("the kind of the op (in quotes if it is not plain)")
    suffix = next((s for s in _SUFFIXES if word.endswith(s)), "")
    kind = word.removesuffix(suffix) if quoted is None else quoted
    return kind, suffix[1:] or "forward"


@contextlib.contextmanager
def _at(line: _Line) -> Iterator[None]:
    """Errors inside name the line."""
    try:
        yield
    except GraphError as error:
        where = f"line {line.number}: {error.field}"
        raise GraphError(error.found, fix=error.fix, field=where) from None


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    shape: list[int]
    dtype: str = "f32"
    role: str = "activation"
    source: str = ""


class _Op(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, _Scalar | list[_Scalar]] = {}
    scope: str = ""
    phase: str = "forward"
    forward: str = ""


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    name: str
    tensors: list[_Tensor]
    ops: list[_Op]
    outputs: list[str] = []
    captured: bool = False


def to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain values; `from_json` gives an equal graph back."""
    wire = _Graph(
        f"partita/graph@{JSON_VERSION}",
        graph.name,
        [_Tensor(t.name, list(t.shape), t.dtype, t.role, t.source) for t in graph.tensors],
        [_wire_op(op) for op in graph.ops],
        list(graph.outputs),
        graph.is_captured,
    )
    plain: dict[str, Any] = msgspec.to_builtins(wire)
    if not graph.is_captured:
        del plain["captured"]
    return plain


def from_json(value: object, file: str = "") -> Graph:
    """The graph that plain values describe; errors name the field."""
    if not isinstance(value, dict):
        raise FileError("is not a JSON object", fix="a graph file is one", file=file)
    check_format(value, "graph", JSON_VERSION, file)
    wire = convert(value, _Graph, file)
    try:
        return assemble(
            wire.name,
            [Tensor(t.name, tuple(t.shape), t.dtype, t.role, t.source) for t in wire.tensors],
            [_op(op) for op in wire.ops],
            wire.outputs,
            is_captured=wire.captured,
        )
    except GraphError as error:
        raise (error.within(file) if file else error) from None


def _wire_op(op: Op) -> _Op:
    attrs = {key: _wire_attr(value) for key, value in op.attrs}
    inputs, outputs = list(op.inputs), list(op.outputs)
    return _Op(op.name, op.kind, inputs, outputs, attrs, op.scope, op.phase, op.forward)


def _op(op: _Op) -> Op:
    attrs = tuple((key, _attr(value)) for key, value in sorted(op.attrs.items()))
    inputs, outputs = tuple(op.inputs), tuple(op.outputs)
    return Op(op.name, op.kind, inputs, outputs, attrs, op.scope, op.phase, op.forward)


def _wire_attr(value: Attr) -> _Scalar | list[_Scalar]:
    return [*value] if isinstance(value, tuple) else value


def _attr(value: _Scalar | list[_Scalar]) -> Attr:
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


def schema_record() -> type:
    """The record that a graph file is read by: its JSON Schema is that of the file."""
    return _Graph


WRITERS: dict[str, Callable[[Graph], bytes | str]] = {
    ".json": lambda graph: encode_json(to_json(graph)),
    ".txt": to_text,
    ".dot": to_dot,
    ".svg": to_svg,
}


def read_graph(path: str | Path) -> Graph:
    """A graph from its JSON or text form, told apart by the name's ending or by the content."""
    file, data = str(path), read_bytes(path)
    ending = Path(path).suffix.lower()
    if ending == ".json" or (ending != ".txt" and data.lstrip()[:1] == b"{"):
        return from_json(decode_json(data, file), file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"is not text (byte {error.start} is no UTF-8)",
            fix="give a graph as JSON or in its text form",
            file=file,
        ) from None
    return from_text(text, file)


def write_graph(path: str | Path, graph: Graph, overwrite: bool = False) -> Path:
    """Write a graph in the form that the name's ending says."""
    writer = WRITERS.get(Path(path).suffix.lower())
    if writer is None:
        raise FileError(
            f"the ending {Path(path).suffix!r} says no form of a graph",
            fix=f"end the name in {', '.join(WRITERS)}",
            file=str(path),
        )
    return write_atomically(path, writer(graph), overwrite=overwrite)
