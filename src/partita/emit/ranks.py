"""A plan's step on one rank as plain PyTorch: local shapes, explicit collectives, one line each.

The program of a plan says what every rank does, op by op, forward and backward; here it is written
down for one rank, in its order:

    up = F.linear(x, up_weight, up_bias)        # [8, 8] of [8, 32], tp S(1)
    down = F.linear(relu, down_weight)          # [8, 16], tp P
    down_2 = all_reduce(down, tp)               # [8, 16], tp R

`load_shards` cuts the rank's parameters out of the model's state dict, `groups` makes the process
groups, `step` runs forward and backward and gives outputs and gradients, as shards. The optimizer
is the user's: where ZeRO shards gradients it gets parts, and gathers what it has updated. For one
stage that runs its batch at once; uneven shares and what exchanges borders, or statistics of other
ops than norms and softmaxes, are refused with the op.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partita.capture.torch_program import TorchNode
from partita.emit.names import MOST, unused, variable
from partita.emit.rank_nodes import ignored_target, numbers_of, told, unsaid
from partita.emit.rank_ops import CALLS, HELPERS, SHARED, RankOp, backward_lines, forward_line
from partita.emit.text import WIDTH, Bracket, Expr, docstring, quoted, statement
from partita.errors import PlanError
from partita.graph.packed import read_source
from partita.graph.record import Call, Graph
from partita.graph.splits import placements
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.plans import Axis, Stage
from partita.program import Program

Shape = tuple[int, ...]

OWN_NAMES = (
    "dist", "inputs", "parameters", "groups", "outputs", "gradients_of", "state_dict", "step",
    "load_shards", "make_groups", "seed", *(f"x{i}" for i in range(10)),
)  # fmt: skip
COLLECTIVES = {
    "all_reduce": '''def all_reduce(x, group):
    """The sum over the group, on every rank."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x
''',
    "all_gather": '''def all_gather(x, dim, group):
    """The shards of the group put together along a dim."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)
''',
    "reduce_scatter": '''def reduce_scatter(x, dim, group):
    """This rank's shard of the sum over the group."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out
''',
    "gather_parts": '''def gather_parts(x, size, group):
    """Flat parts of nearly equal length put together; all of them have `size` numbers."""
    count = dist.get_world_size(group)
    sizes = [size * (k + 1) // count - size * k // count for k in range(count)]
    x = torch.cat([x, x.new_zeros(max(sizes) - len(x))])
    parts = [torch.empty_like(x) for _ in sizes]
    dist.all_gather(parts, x, group=group)
    return torch.cat([part[:own] for part, own in zip(parts, sizes, strict=True)])
''',
    "all_to_all": '''def all_to_all(x, from_dim, to_dim, group):
    """The same tensor in shards along another dim."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), to_dim))
    taken = torch.empty_like(sent)
    dist.all_to_all_single(taken, sent, group=group)
    return torch.cat(list(taken), from_dim)
''',
}


@dataclass(frozen=True, slots=True)
class EmittedRank:
    """The source for one rank, and how what `step` returns lies on the mesh."""

    source: str
    outputs: dict[str, Value]
    gradients: dict[str, Value]  # by parameter; in flat parts where ZeRO shards them


def emit_rank(
    program: Program, graph: Graph, stage: Stage, rank: int,
    nodes: Mapping[str, TorchNode] | None = None,
) -> EmittedRank:  # fmt: skip
    """The program of one stage, written for one rank of its mesh.

    The ops of a captured graph come with the nodes that they were made from: an op whose node says
    more than its line is refused.
    """
    if not 0 <= rank < len(stage.mesh.devices):
        last = len(stage.mesh.devices) - 1
        raise PlanError(f"found {rank}", fix=f"ranks are 0 to {last}", field="rank")
    return _RankSource(program, graph, stage, rank, nodes or {}).emit()


@dataclass
class _RankSource:
    """The lines of one rank while they are written."""

    program: Program
    graph: Graph
    stage: Stage
    rank: int
    nodes: Mapping[str, TorchNode] = field(default_factory=dict)  # by forward op
    lines: list[str] = field(default_factory=list)
    variables: dict[int, str] = field(default_factory=dict)  # by value
    loaded: dict[str, str] = field(default_factory=dict)  # parameter -> how its shard is cut
    fed: dict[str, None] = field(default_factory=dict)  # inputs that are read
    taken: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # helpers
    outputs: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    phase: Phase = Phase.NONE

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.stage.mesh.axes

    @property
    def place(self) -> tuple[int, ...]:
        """The coordinates of this rank; the last axis counts fastest."""
        left, coordinates = self.rank, []
        for axis in reversed(self.axes):
            left, coordinate = divmod(left, axis.size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def emit(self) -> EmittedRank:
        self.taken |= {*HELPERS, *COLLECTIVES, *OWN_NAMES, *(variable(a.name) for a in self.axes)}
        done: set[int] = set()
        order = self.program.order
        for task in range(self.program.num_tasks) if order is None else order.tolist():
            number = int(self.program.work[task])
            if number >= 0 and number not in done:
                done.add(number)
                self._write(self.program.works[number])
        values = self.program.values
        for tensor in self.graph.outputs:
            if tensor not in self.outputs:
                raise self._refused(f"{tensor} is not made")
        return EmittedRank(
            self._source(),
            {name: values[number] for name, number in self.outputs.items()},
            {name: values[number] for name, number in self.gradients.items()},
        )

    # Works.

    def _write(self, work: Work) -> None:
        if work.body >= 0 or work.peer >= 0:
            raise self._refused("it has blocks of a pipeline")
        if work.purpose in (Purpose.RESIDENT, Purpose.OTHER):
            return
        if work.phase is Phase.UPDATE and work.purpose is Purpose.PARAMETER_GATHER:
            return  # of what the optimizer made, which is the user's
        if work.purpose is Purpose.UPDATE:
            for parameter, gradient in zip(work.reads[::2], work.reads[1::2], strict=True):
                self._variable(gradient)
                self.gradients[self.program.values[parameter].tensor] = gradient
            return
        self._begin(work.phase)
        if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            self._compute(work)
        elif work.purpose is Purpose.EXCHANGE:
            op = self.graph.op(work.op)
            kind = self.graph.op(op.forward).kind if op.forward else op.kind
            if kind not in SHARED:  # those have exchanged what they need in their own lines
                raise self._refused(f"op {work.op!r} exchanges statistics or borders")
        else:
            write = {
                Purpose.CONVERSION: self._convert,
                Purpose.GRADIENT_REDUCTION: self._reduce,
                Purpose.PARAMETER_GATHER: self._gather,
            }[work.purpose]
            for read, made in zip(work.reads, work.writes, strict=True):
                write(work, read, made)

    def _compute(self, work: Work) -> None:
        op = self.graph.op(work.op)
        reads = [self._variable(number) for number in work.reads]
        if op.phase != "forward" and not op.forward:
            self._made(work.writes, " + ".join(reads))
            return
        call = self.graph.call(op)
        forward = self.graph.op(op.forward) if op.forward else op
        node = self.nodes.get(forward.name)
        call = call if node is None else told(call, node)
        cut = [i for i, dim in enumerate(work.dims) if dim and self.axes[i].size > 1]
        ways = tuple((work.dims[i], self.axes[i].size, self.place[i]) for i in cut)
        groups = tuple(variable(self.axes[i].name) for i in cut)
        inputs, outputs = self._forward_shapes(call, work)
        here = RankOp(
            forward.name, call, ways, inputs, outputs, self.graph.is_training, groups,
            self._place_of(forward.name), None if node is None else ignored_target(node),
        )  # fmt: skip
        why = (
            ""
            if node is None
            else unsaid(Call(call.kind, call.attrs, call.inputs, call.outputs), node)
        )
        if why:
            raise here.refused(why)
        lines: list[Expr]
        if call.kind == "constant":  # its numbers are not in the graph: given as inputs are
            value = self.program.values[work.writes[0]]
            whole = f"inputs[{quoted(value.tensor)}]"
            if node is not None:
                beside = quoted(self.graph.inputs[0].name)
                whole = f"{numbers_of(node)}, device=inputs[{beside}].device)"
            lines = [self._cut(whole, value)]
        elif op.forward:
            if len(set(forward.inputs)) < len(forward.inputs):
                raise here.refused("reads a tensor twice")
            lines = backward_lines(here, dict(zip(call.reads, reads, strict=True)))
        else:
            lines = [forward_line(here, reads)]
        if len(lines) == len(work.writes):
            for number, line in zip(work.writes, lines, strict=True):
                self._made((number,), line)
        else:
            self._made(work.writes, lines[0])

    def _place_of(self, name: str) -> int:
        """The number of an op among those that draw a mask."""
        drawing = [op.name for op in self.graph.ops if op.attr("fn") == "dropout"]
        return drawing.index(name) if name in drawing else 0

    def _forward_shapes(
        self, call: Call, work: Work
    ) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The shards of the forward op's inputs and outputs under this split."""
        forward = Call(call.kind, call.attrs, call.inputs, call.outputs)
        read, made = placements(forward, work.dims)
        inputs = (self._local(*pair) for pair in zip(call.inputs, read, strict=True))
        outputs = (self._local(*pair) for pair in zip(call.outputs, made, strict=True))
        return tuple(inputs), tuple(outputs)

    def _convert(self, work: Work, read: int, made: int) -> None:
        have, need = self.program.values[read], self.program.values[made]
        x = self._variable(read)
        changed = [i for i, pair in enumerate(zip(have.layout, need.layout, strict=True))
                   if pair[0] != pair[1]]  # fmt: skip
        if not changed:
            raise self._refused(f"{work.collective} of {have} changes nothing")
        for axis in changed:
            before, after = have.layout[axis], need.layout[axis]
            group = variable(self.axes[axis].name)
            if before.kind == "partial" and after.kind == "replicate":
                x = self._helped("all_reduce", f"{x}, {group}")
            elif before.kind == "partial" and after.kind == "shard":
                x = self._helped("reduce_scatter", f"{x}, {after.dim}, {group}")
            elif before.kind == "shard" and after.kind == "replicate":
                x = self._helped("all_gather", f"{x}, {before.dim}, {group}")
            elif before.kind == "shard" and after.kind == "shard":
                x = self._helped("all_to_all", f"{x}, {before.dim}, {after.dim}, {group}")
            else:
                raise self._refused(f"{have} becomes {need}")
        self._made((made,), x)

    def _reduce(self, work: Work, read: int, made: int) -> None:
        """Gradients added up along an axis; with ZeRO each rank keeps its part."""
        x, group = self._variable(read), variable(self.axes[work.axis].name)
        if work.collective == "reduce_scatter":
            value, count = self.program.values[read], self.axes[work.axis].size
            size = self._num_elements(value, value.flat)
            if size % count:
                total = self._helped("all_reduce", f"{x}.flatten(), {group}")
                first, end = self._ends(size, work.axis)
                self._made((made,), f"{total}[{first}:{end}]")
                return
            self._made((made,), self._helped("reduce_scatter", f"{x}.flatten(), 0, {group}"))
        else:
            self._made((made,), self._helped("all_reduce", f"{x}, {group}"))

    def _gather(self, work: Work, read: int, made: int) -> None:
        """Parameters put together from the parts that ZeRO keeps."""
        value = self.program.values[made]
        x, group = self._variable(read), variable(self.axes[work.axis].name)
        shape = list(self._local(self.graph.tensor(value.tensor).shape, value.layout))
        after = ")" if value.flat else f").reshape({shape})"
        size = self._num_elements(value, value.flat)
        helper, how = ("all_gather", "0")
        if size % self.axes[work.axis].size:
            helper, how = ("gather_parts", str(size))
        self.used.add(helper)
        self._made((made,), Bracket(f"{helper}(", (x, how, group), after))

    def _helped(self, helper: str, arguments: str) -> str:
        self.used.add(helper)
        return f"{helper}({arguments})"

    # Values.

    def _stored(self, name: str) -> str:
        """What takes a parameter out of the state dict: an entry, or a part of one."""
        tensor = self.graph.tensor(name)
        if not tensor.source:
            return f"state_dict[{quoted(name)}]"
        packed = read_source(tensor.source)
        return packed.expression(f"state_dict[{quoted(packed.name)}]", tensor.shape)

    def _variable(self, number: int) -> str:
        if number in self.variables:
            return self.variables[number]
        value = self.program.values[number]
        if value.of >= 0:
            line = self._sliced(value)
        elif value.source == "parameter":
            line = f"parameters[{quoted(value.tensor)}]"
            self.loaded[value.tensor] = self._cut(self._stored(value.tensor), value)
        elif value.source == "input":
            self.fed[value.tensor] = None
            line = self._cut(f"inputs[{quoted(value.tensor)}]", value)
        else:
            raise self._refused(f"{value} is read before it is there")
        self._made((number,), line)
        return self.variables[number]

    def _sliced(self, value: Value) -> str:
        """A value that is a part of another on this rank."""
        line, have = self._variable(value.of), self.program.values[value.of]
        for axis, before, after, place in zip(
            self.axes, have.layout, value.layout, self.place, strict=True
        ):
            if before == after:
                continue
            if before.kind == "replicate" and after.kind == "shard":
                line = f"{line}.chunk({axis.size}, {after.dim})[{place}]"
            elif before.kind == "replicate" and after.kind == "partial":
                line = line if place == 0 else f"torch.zeros_like({line})"
            else:
                raise self._refused(f"{have} is read as {value}")
        return self._parted(line, value, len(have.flat))

    def _parted(self, line: str, value: Value, since: int = 0) -> str:
        """This rank's part of a shard, flattened, along the axes where ZeRO keeps parts."""
        for k, axis in enumerate(value.flat):
            if k < since:
                continue
            size, count = self._num_elements(value, value.flat[:k]), self.axes[axis].size
            first, end = self._ends(size, axis)
            part = f"[{first}:{end}]" if size % count else f".chunk({count})[{self.place[axis]}]"
            line = f"{line}.flatten(){part}"
        return line

    def _num_elements(self, value: Value, flat: Sequence[int]) -> int:
        """How many numbers of a value this rank has, in parts along some axes."""
        size = math.prod(self._local(self._shape(value), value.layout))
        for axis in flat:
            first, end = self._ends(size, axis)
            size = end - first
        return size

    def _ends(self, size: int, axis: int) -> tuple[int, int]:
        """Where this rank's part of so many numbers begins and ends."""
        count, place = self.axes[axis].size, self.place[axis]
        return size * place // count, size * (place + 1) // count

    def _shape(self, value: Value) -> Shape:
        return self.graph.tensor(value.tensor).shape

    def _cut(self, line: str, value: Value) -> str:
        """This rank's shard of a whole tensor."""
        for axis, placement, place in zip(self.axes, value.layout, self.place, strict=True):
            if placement.kind == "shard" and axis.size > 1:
                line = f"{line}.chunk({axis.size}, {placement.dim})[{place}]"
            elif placement.kind == "partial" and place:
                line = f"torch.zeros_like({line})"
        return self._parted(line, value)

    def _made(self, numbers: Sequence[int], line: Expr) -> None:
        """A line that makes values, with their shapes and layouts beside it."""
        names, comments = [], []
        for number in numbers:
            value = self.program.values[number]
            name = unused(_short_name(value.tensor), self.taken)
            self.taken.add(name)
            self.variables[number] = name
            names.append(name)
            comments.append(self._comment(value))
            if value.tensor in self.graph.outputs:
                self.outputs[value.tensor] = number
        for helper in HELPERS:
            if re.search(rf"\b{helper}\(", str(line)):
                self.used.update((helper, *CALLS.get(helper, ())))
        if "all_reduce(" in str(line):
            self.used.add("all_reduce")
        written = statement(line, 4, before=f"{', '.join(names)} = ")
        comments = list(dict.fromkeys(comments))
        if len(written) == 1 and len(f"{written[0]}  # {'; '.join(comments)}") <= WIDTH:
            self.lines.append(f"{written[0]}  # {'; '.join(comments)}")
        else:
            self.lines += [*(f"    # {comment}" for comment in comments), *written]

    def _comment(self, value: Value) -> str:
        whole = self.graph.tensor(value.tensor).shape
        local = self._local(whole, value.layout)
        local = (self._num_elements(value, value.flat),) if value.flat else local
        of = f" of {list(whole)}" if local != whole else ""
        lies = ", ".join(
            f"{variable(axis.name)} {placement}"
            for axis, placement in zip(self.axes, value.layout, strict=True)
        )
        names = ", ".join(variable(self.axes[axis].name) for axis in value.flat)
        parts = f", in parts along {names}" if names else ""
        return f"{list(local)}{of}, {lies}{parts}"

    def _local(self, shape: Shape, layout: Layout) -> Shape:
        sizes = list(shape)
        for axis, placement in zip(self.axes, layout, strict=True):
            if placement.kind != "shard" or axis.size == 1:
                continue
            if axis.weights or sizes[placement.dim] % axis.size:
                raise self._refused(
                    f"{sizes[placement.dim]} elements along {axis.name}={axis.size} are uneven"
                )
            sizes[placement.dim] //= axis.size
        return tuple(sizes)

    def _refused(self, why: str) -> PlanError:
        return PlanError(
            f"stage {self.stage.name!r} cannot be written for a rank: {why}",
            fix="emit without --rank, or run the plan",
            field="emit",
        )

    # The module.

    def _begin(self, phase: Phase) -> None:
        words = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHT: "backward",
                 Phase.REDUCE: "what ends the step"}  # fmt: skip
        if words.get(phase) != words.get(self.phase) and phase in words:
            self.lines += ["", f"    # {words[phase]}"]
        self.phase = phase

    def _source(self) -> str:
        used = [text for name, text in (COLLECTIVES | HELPERS).items() if name in self.used]
        body = "\n".join([*(f"{text}\n" for text in used), *self._functions()])
        imports = ["import torch"] if "torch." in body else []
        imports.append("import torch.distributed as dist")
        if "F." in body:
            imports += ["from torch import nn", "", "F = nn.functional"]
        return "\n".join([*self._docstring(), "", *imports, "", "", body])

    def _docstring(self) -> list[str]:
        mesh = ", ".join(f"{variable(axis.name)}={axis.size}" for axis in self.axes)
        where = ", ".join(
            f"{variable(axis.name)} {place}"
            for axis, place in zip(self.axes, self.place, strict=True)
        )
        return docstring(
            [
                f"{self.graph.name} on {mesh}: rank {self.rank} of "
                f"{len(self.stage.mesh.devices)}, which is {where}.",
                "",
                "One step, op by op. Beside each line: the shape of this rank's shard, and how the",
                "tensor lies along every axis: S(i) in shards of dim i, R replicated, P partial",
                "sums.",
            ],
            0,
        )

    def _functions(self) -> list[str]:
        names = [variable(axis.name) for axis in self.axes]
        groups = [
            f"    {name}, _ = dist.new_subgroups_by_enumeration({self._ranks(i)})"
            for i, name in enumerate(names)
        ]
        keys = ", ".join(f"{quoted(name)}: {name}" for name in names)
        loads = [f"        {quoted(name)}: {line}," for name, line in self.loaded.items()]
        outputs = ", ".join(self._item(name, value) for name, value in self.outputs.items())
        gradients = [f"        {self._item(name, n)}," for name, n in self.gradients.items()]
        if gradients:
            ends = ["    gradients_of = {", *gradients, "    }"]
        else:
            ends = ["    gradients_of = {}"]
        results = [f"    outputs = {{{outputs}}}", *ends, "    return outputs, gradients_of"]
        draws = "drawn" in self.used
        return [
            "def make_groups():",
            '    """The process groups of the collectives; every rank calls this."""',
            *groups,
            f"    return {{{keys}}}",
            "",
            "",
            "def load_shards(state_dict):",
            '    """This rank\'s shards of the parameters of the model."""',
            "    return {",
            *loads,
            "    }",
            "",
            "",
            f"def step(inputs, parameters, groups{', seed=0' if draws else ''}):",
            '    """Outputs and gradients of one batch, as this rank has them."""',
            *(f"    {name} = groups[{quoted(name)}]" for name in names if self._calls(name)),
            *self._read_lines(results),
            "",
            *results,
            "",
        ]

    def _read_lines(self, results: list[str]) -> list[str]:
        """The lines but those that fetch what this rank does not read, a bias that others add."""
        text = "\n".join([*self.lines, *results])
        kept = []
        for line in self.lines:
            name, _, rest = line.strip().partition(" = ")
            fetched = rest.startswith(("parameters[", "inputs["))
            if not fetched or len(re.findall(rf"\b{name}\b", _without_strings(text))) > 1:
                kept.append(line)
        return kept

    def _calls(self, group: str) -> bool:
        return any(re.search(rf"\b{group}\b", line.partition("#")[0]) for line in self.lines)

    def _item(self, name: str, number: int) -> str:
        return f"{quoted(name)}: {self.variables[number]}"

    def _ranks(self, axis: int) -> list[list[int]]:
        rank = {device: k for k, device in enumerate(self.stage.mesh.devices)}
        return [[rank[device] for device in group] for group in self.stage.mesh.groups(axis)]


def _short_name(tensor: str) -> str:
    """A variable for a tensor: its name without the outer modules, where it is long."""
    parts = tensor.split(".")
    while len(parts) > 2 and len(".".join(parts)) > MOST:
        parts = parts[1:]
    return variable(".".join(parts))


def _without_strings(text: str) -> str:
    return re.sub(r'"[^"]*"|#.*', "", text)
