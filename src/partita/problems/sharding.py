"""Sharding: choose one split for every op so that all costs together are least.

    minimise over x:  sum_v costs[v][x_v] + sum_e matrices[matrix_of[e]][x_src, x_dst]

The pairwise form that PaSE solves (Elango, IPDPS 2021): `costs` is what an op does and sends by
itself, a matrix what moving a tensor between two layouts takes. Edges have no direction beyond the
matrix's rows and columns; several between the same two ops are added up, and cycles are no matter.

A cost may be +inf: the choice, or the pair of choices, is forbidden (it does not fit in memory, or
the layouts cannot follow each other). NaN and -inf are refused, and so are finite costs beyond
1e100, because sums of those overflow to "forbidden".

Saved as .npz (`K voff vcost edges emat mat_<j>`, and optionally `cfg_<v> opt_cost opt_cfg
opt_source meta`) or as JSON with the record's field names, where null means forbidden.

Arrays in .npz files are read without trust: no pickles, and no more memory than the file deserves.
An .npz file is a zip of .npy members. The sizes in the zip's table, which no member can exceed when
it is unpacked, must stay within `MAX_ARRAY_BYTES` together; then each member's header (type and
shape) must agree with its size before its content is unpacked. So a small file that would unpack to
terabytes is refused while it is still small.
"""

import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from partita import files
from partita.errors import FileError, InputError, ProblemError

MAX_ARRAY_BYTES = 512 * 1024**2
MAX_MEMBERS = 1_000_000
_PLAIN_KINDS = "biufUS"  # no objects, no records: nothing that could hold more than numbers or text
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    NotImplementedError,  # a compression that this Python does not have
    RuntimeError,  # an encrypted member
)
FORMAT = "sharding-problem"
LARGEST = 1e100
AGREEMENT = 1e-6  # relative; how well a recorded optimum must match its own assignment
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_SINGLE = ("K", "voff", "vcost", "edges", "emat", "opt_cost", "opt_cfg", "opt_source", "meta")


def read_arrays(data: bytes, file: str = "") -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _unpack(archive, file)
    except _UNREADABLE as error:
        reason = str(error).split("\n")[0][:100] or type(error).__name__
        fix = "give an .npz file of plain arrays"
        raise FileError(f"is not an .npz file ({reason})", fix=fix, file=file) from None


def write_arrays(arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """The bytes of an .npz file; the same arrays give the same bytes on any day."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")  # its date is 1980, not today
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())
    return buffer.getvalue()


def _unpack(archive: zipfile.ZipFile, file: str) -> dict[str, npt.NDArray[Any]]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise FileError(f"holds {len(members):,} arrays", fix=f"at most {MAX_MEMBERS:,}", file=file)
    seen: set[str] = set()
    for member in members:
        if not member.filename.endswith(".npy") or member.filename in seen:
            wrong = "is there twice" if member.filename in seen else "is no .npy member"
            raise FileError(wrong, field=member.filename[:60], file=file)
        seen.add(member.filename)
    total = sum(member.file_size for member in members)
    if total > MAX_ARRAY_BYTES:
        raise FileError(
            f"would unpack to {total:,} bytes", fix=f"at most {MAX_ARRAY_BYTES:,}", file=file
        )
    return {
        member.filename.removesuffix(".npy"): _read_member(archive, member, file)
        for member in members
    }


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: str) -> npt.NDArray[Any]:
    with archive.open(member) as stream:
        shape, by_columns, dtype, header_bytes = _header(stream)
        needed = math.prod(shape) * dtype.itemsize
        too_wide = dtype.kind == "f" and dtype.itemsize > 8  # would overflow where it is used
        if dtype.kind not in _PLAIN_KINDS or dtype.subdtype is not None or too_wide:
            raise FileError(
                f"has the type {str(dtype)[:40]}",
                fix="plain numbers or text are needed",
                field=member.filename[:60],
                file=file,
            )
        if min(shape, default=0) < 0 or needed != member.file_size - header_bytes:
            raise FileError(
                f"says the shape {shape} of {dtype}, {needed:,} bytes, and has "
                f"{member.file_size - header_bytes:,}",
                fix="write the file again",
                field=member.filename[:60],
                file=file,
            )
        content = stream.read(needed)  # reading to the end also compares the checksum
        if len(content) != needed or stream.read(1):
            raise FileError("is cut off", fix="write the file again", field=member.filename[:60])
    array: npt.NDArray[Any] = np.frombuffer(content, dtype=dtype)
    array = array.reshape(shape, order="F" if by_columns else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, column-major or not, type, and how many bytes the header took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers of Python 2, which are read all the same
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_columns, dtype = read(stream)
    return shape, by_columns, dtype, stream.tell()


@dataclass(frozen=True, slots=True)
class ShardingSolution:
    """The number of the chosen split, op by op."""

    assignment: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As the `solution` of an answer."""
        return {"assignment": list(self.assignment)}

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "ShardingSolution":
        """Read what `to_json` wrote."""
        return files.convert(value, cls, file)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardingProblem:
    """Costs of every choice of every op, and of every pair of choices along every edge."""

    costs: tuple[Floats, ...]
    edges: tuple[tuple[int, int], ...] = ()
    matrix_of: tuple[int, ...] = ()
    matrices: tuple[Floats, ...] = ()
    names: tuple[str, ...] = ()
    splits: tuple[Ints, ...] = ()  # per op: the split factor of each loop dim, one row per choice
    known: ShardingSolution | None = None  # an optimum somebody recorded
    known_cost: float | None = None
    known_source: str = ""
    meta: str = ""  # JSON text: where the problem comes from

    def __post_init__(self) -> None:
        _freeze(self, "costs", np.float64, 1)
        _freeze(self, "matrices", np.float64, 2)
        _freeze(self, "splits", np.int64, 2)
        _check_ops(self)
        _check_edges(self)
        _check_known(self)

    @property
    def num_ops(self) -> int:
        """How many ops choose."""
        return len(self.costs)

    @property
    def num_choices(self) -> tuple[int, ...]:
        """How many choices each op has."""
        return tuple(len(cost) for cost in self.costs)

    def name(self, op: int) -> str:
        """What to call an op in a sentence."""
        return f"op {op} ({self.names[op]})" if self.names else f"op {op}"

    def to_json(self) -> dict[str, Any]:
        """As plain values; a forbidden cost becomes null."""
        return {
            "format": f"partita/{FORMAT}@1",
            "costs": [_nulls(cost) for cost in self.costs],
            "edges": [list(edge) for edge in self.edges],
            "matrix_of": list(self.matrix_of),
            "matrices": [[_nulls(row) for row in matrix] for matrix in self.matrices],
            "names": list(self.names),
            "splits": [split.tolist() for split in self.splits],
            "known": None if self.known is None else self.known.to_json(),
            "known_cost": self.known_cost,
            "known_source": self.known_source,
            "meta": self.meta,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingProblem):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.num_choices, self.edges, self.matrix_of))

    def __repr__(self) -> str:
        choices = self.num_choices
        return (
            f"ShardingProblem({self.num_ops} ops of {min(choices)} to {max(choices)} choices, "
            f"{len(self.edges)} edges)"
        )


def check(problem: ShardingProblem, solution: ShardingSolution) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    chosen, counts = solution.assignment, problem.num_choices
    if len(chosen) != len(counts):
        return (f"the assignment has {len(chosen)} entries for {len(counts)} ops",)
    outside = tuple(
        f"{problem.name(op)} is given choice {choice} of {count}"
        for op, (choice, count) in enumerate(zip(chosen, counts, strict=True))
        if not 0 <= choice < count
    )
    return outside or _forbidden(problem, chosen)


def evaluate(problem: ShardingProblem, solution: ShardingSolution) -> float:
    """The objective of a valid solution."""
    violations = check(problem, solution)
    if violations:
        raise ProblemError(violations[0], fix="give a valid solution", field="solution")
    return _total(problem, solution.assignment)


def lower_bound(problem: ShardingProblem) -> float:
    """Every op takes what is best for itself and for its half of each edge; inf: infeasible.

    An edge costs M[x, y] >= (min over y of M[x, y]) / 2 + (min over x of M[x, y]) / 2, so the
    halves can be given to the two ops and every op minimised alone. O(edges x matrix size).
    """
    return float(sum(cost.min() for cost in own_costs(problem)))


def own_costs(problem: ShardingProblem) -> tuple[Floats, ...]:
    """Per op and choice: its cost and the least its half of each edge can add."""
    own = [cost.copy() for cost in problem.costs]
    least = [(m.min(axis=1) / 2, m.min(axis=0) / 2) for m in problem.matrices]
    for (src, dst), index in zip(problem.edges, problem.matrix_of, strict=True):
        rows, columns = least[index]
        own[src] += rows
        own[dst] += columns
    return tuple(own)


def read(path: str | Path) -> ShardingProblem:
    """Read a problem from .npz or JSON."""
    data = files.read_bytes(path)
    if data.startswith(b"PK") or Path(path).suffix.lower() == ".npz":
        return from_npz(data, str(path))
    return from_json(files.decode_json(data, str(path)), str(path))


def write_npz(problem: ShardingProblem, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a problem as .npz; the same problem gives the same bytes."""
    offsets = np.cumsum((0, *problem.num_choices), dtype=np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {
        "K": np.array(problem.num_choices, np.int32),
        "voff": offsets,
        "vcost": np.concatenate(problem.costs),
        "edges": np.array(problem.edges, np.int32).reshape(-1, 2),
        "emat": np.array(problem.matrix_of, np.int32),
    }
    arrays |= {f"cfg_{op}": split for op, split in enumerate(problem.splits)}
    arrays |= {f"mat_{index}": matrix for index, matrix in enumerate(problem.matrices)}
    if problem.known is not None:
        arrays["opt_cfg"] = np.array(problem.known.assignment, np.int32)
    if problem.known_cost is not None:
        arrays["opt_cost"] = np.array(problem.known_cost)
    if problem.known_source:
        arrays["opt_source"] = np.array(problem.known_source)
    if problem.meta or problem.names:
        arrays["meta"] = np.array(_meta_with_names(problem))
    return files.write_atomically(path, write_arrays(arrays), overwrite=overwrite)


@dataclass(frozen=True, slots=True)
class _ShardingWire:
    """The JSON form, before the lists are arrays."""

    costs: tuple[tuple[float | None, ...], ...]
    edges: tuple[tuple[int, int], ...] = ()
    matrix_of: tuple[int, ...] = ()
    matrices: tuple[tuple[tuple[float | None, ...], ...], ...] = ()
    names: tuple[str, ...] = ()
    splits: tuple[tuple[tuple[int, ...], ...], ...] = ()
    known: ShardingSolution | None = None
    known_cost: float | None = None
    known_source: str = ""
    meta: str = ""


def from_json(value: dict[str, Any], file: str = "") -> ShardingProblem:
    """Read what `to_json` wrote."""
    files.check_format(value, FORMAT, 1, file)
    wire = files.convert(value, _ShardingWire, file)
    try:
        return ShardingProblem(
            costs=tuple(_infinities([row], f"costs[{op}]")[0] for op, row in enumerate(wire.costs)),
            edges=wire.edges,
            matrix_of=wire.matrix_of,
            matrices=tuple(_infinities(m, f"matrices[{j}]") for j, m in enumerate(wire.matrices)),
            names=wire.names,
            splits=tuple(_integers(s, f"splits[{op}]") for op, s in enumerate(wire.splits)),
            known=wire.known,
            known_cost=wire.known_cost,
            known_source=wire.known_source,
            meta=wire.meta,
        )
    except InputError as error:
        raise error.within(file) from None


def from_npz(data: bytes, file: str = "") -> ShardingProblem:
    """Read the bytes of an .npz file; nothing in them is executed."""
    arrays = read_arrays(data, file)
    try:
        return _from_arrays(arrays)
    except InputError as error:
        field = _array_field(error.field)
        raise type(error)(error.found, fix=error.fix, field=field, file=file) from None


def _from_arrays(arrays: dict[str, npt.NDArray[Any]]) -> ShardingProblem:
    _refuse_unknown_keys(arrays)
    counts = _array(arrays, "K", "iu", 1)
    offsets = _array(arrays, "voff", "iu", 1)
    costs = _array(arrays, "vcost", "fiu", 1)
    if counts.size and not 1 <= counts.min() <= counts.max() <= len(costs):
        wrong = f"holds {counts.min()} to {counts.max()} where vcost has {len(costs)} entries"
        raise ProblemError(wrong, fix="every op needs at least one choice", field="K")
    expected = np.cumsum(np.concatenate(([0], counts)))
    if offsets.shape != expected.shape or (offsets != expected).any():
        raise ProblemError(
            "is not the running sum of K", fix="voff[v + 1] - voff[v] must be K[v]", field="voff"
        )
    if len(costs) != expected[-1]:
        wrong = f"has {len(costs)} entries where K adds up to {expected[-1]}"
        raise ProblemError(wrong, fix="one cost per choice", field="vcost")
    edges = _array(arrays, "edges", "iu", 2)
    if edges.shape[1] != 2:
        wrong = f"has the shape {edges.shape}"
        raise ProblemError(wrong, fix="two ops per edge are needed", field="edges")
    matrix_of = _array(arrays, "emat", "iu", 1)
    splits = _numbered(arrays, "cfg_", "iu")
    meta = _text(arrays, "meta")
    return ShardingProblem(
        costs=tuple(np.split(costs.astype(np.float64), expected[1:-1])) if len(counts) else (),
        edges=tuple((int(src), int(dst)) for src, dst in edges),
        matrix_of=tuple(matrix_of.tolist()),
        matrices=_numbered(arrays, "mat_", "fiu"),
        names=_names_in(meta, len(counts)),
        splits=splits,
        known=_known(arrays),
        known_cost=float(_array(arrays, "opt_cost", "fiu", 0)) if "opt_cost" in arrays else None,
        known_source=_text(arrays, "opt_source"),
        meta=meta,
    )


_ARRAY_OF = {  # how the file calls a field of the record, and an entry of it
    "costs": ("vcost", "vcost[op {}]"),
    "matrices": ("mat", "mat_{}"),
    "matrix_of": ("emat", "emat[{}]"),
    "splits": ("cfg", "cfg_{}"),
    "known": ("opt_cfg", ""),
    "known_cost": ("opt_cost", ""),
}


def _array_field(field: str) -> str:
    name, _, index = field.removesuffix("]").partition("[")
    if name not in _ARRAY_OF:
        return field
    whole, entry = _ARRAY_OF[name]
    return entry.format(index) if index else whole


def _refuse_unknown_keys(arrays: dict[str, npt.NDArray[Any]]) -> None:
    for key in arrays:
        prefix, _, number = key.partition("_")
        numbered = prefix in ("cfg", "mat") and number.isdecimal() and number.isascii()
        if key not in _SINGLE and not numbered:
            raise FileError(
                "is no array of a sharding problem",
                fix=f"known are {', '.join(_SINGLE)}, cfg_<op> and mat_<number>",
                field=key,
            )


def _array(
    arrays: dict[str, npt.NDArray[Any]], key: str, kinds: str, ndim: int
) -> npt.NDArray[Any]:
    """The array of that name, of one of these numpy kinds and with that many dims."""
    if key not in arrays:
        raise FileError("is missing", fix=f"the file needs an array {key}", field=key)
    array = arrays[key]
    if array.dtype.kind not in kinds:
        needed = "integers" if kinds == "iu" else "numbers"
        raise FileError(f"has the type {array.dtype}", fix=f"{needed} are needed", field=key)
    if array.ndim != ndim:
        raise FileError(f"has the shape {array.shape}", fix=f"{ndim} dims are needed", field=key)
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise FileError(f"holds {array.max()}", fix="numbers must fit 64 bits", field=key)
    return array.astype(np.int64) if array.dtype.kind in "iu" and kinds == "iu" else array


def _numbered(
    arrays: dict[str, npt.NDArray[Any]], prefix: str, kinds: str
) -> tuple[npt.NDArray[Any], ...]:
    """`prefix0`, `prefix1`, ... in order, none left out."""
    count = sum(key.startswith(prefix) for key in arrays)
    return tuple(_array(arrays, f"{prefix}{index}", kinds, 2) for index in range(count))


def _text(arrays: dict[str, npt.NDArray[Any]], key: str) -> str:
    if key not in arrays:
        return ""
    array = arrays[key]
    if array.dtype.kind != "U" or array.ndim != 0:
        raise FileError(f"has the type {array.dtype}", fix="text is needed", field=key)
    try:  # numpy itself stumbles over numbers that are no characters
        text = array.astype(array.dtype.newbyteorder("<")).tobytes().decode("utf-32-le")
    except UnicodeDecodeError:
        raise FileError("is not text", fix="write the file again", field=key) from None
    return text.rstrip("\0")


def _known(arrays: dict[str, npt.NDArray[Any]]) -> ShardingSolution | None:
    if "opt_cfg" not in arrays:
        return None
    return ShardingSolution(tuple(_array(arrays, "opt_cfg", "iu", 1).tolist()))


def _names_in(meta: str, num_ops: int) -> tuple[str, ...]:
    """The op names that the description may hold."""
    if not meta:
        return ()
    names = _decoded(meta).get("ops")
    if not isinstance(names, list) or len(names) != num_ops:
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def _meta_with_names(problem: ShardingProblem) -> str:
    described = _decoded(problem.meta) if problem.meta else {}
    if not problem.names or described.get("ops") == list(problem.names):
        return problem.meta
    return msgspec.json.encode(described | {"ops": problem.names}).decode()


def _decoded(meta: str) -> dict[str, Any]:
    try:
        return files.decode_json(meta.encode("utf-8", "replace"))
    except FileError as error:
        raise FileError(error.found, fix="JSON text is needed", field="meta") from None


def _freeze(problem: ShardingProblem, field: str, dtype: Any, ndim: int) -> None:
    """Hold read-only copies, so that a frozen record stays what it was; shared ones stay shared."""
    frozen: list[Any] = []
    copies: dict[int, Any] = {}
    for index, given in enumerate(getattr(problem, field)):
        if id(given) in copies:
            frozen.append(copies[id(given)])
            continue
        array = np.array(given, dtype=dtype)
        if array.ndim != ndim:
            wrong, fix = f"has the shape {array.shape}", f"{ndim} dims are needed"
            raise ProblemError(wrong, fix=fix, field=f"{field}[{index}]")
        array.setflags(write=False)
        frozen.append(array)
        copies[id(given)] = array
    object.__setattr__(problem, field, tuple(frozen))


def _check_ops(problem: ShardingProblem) -> None:
    if not problem.costs:
        raise ProblemError("has no ops", fix="give at least one op", field="costs")
    seen: set[int] = set()  # ops that are alike share their costs
    for op, cost in enumerate(problem.costs):
        if not len(cost):
            fix = "every op needs at least one choice"
            raise ProblemError("has no choices", fix=fix, field=f"costs[{op}]")
        if id(cost) not in seen:
            seen.add(id(cost))
            _check_costs(cost, f"costs[{op}]")
    for index, matrix in enumerate(problem.matrices):
        _check_costs(matrix, f"matrices[{index}]")
    if problem.meta:
        _decoded(problem.meta)
    if problem.names and len(problem.names) != problem.num_ops:
        wrong = f"has {len(problem.names)} entries for {problem.num_ops} ops"
        raise ProblemError(wrong, fix="name every op or none", field="names")
    if problem.splits and len(problem.splits) != problem.num_ops:
        wrong = f"has {len(problem.splits)} entries for {problem.num_ops} ops"
        raise ProblemError(wrong, fix="describe every op or none", field="splits")
    for op, split in enumerate(problem.splits):
        if len(split) != len(problem.costs[op]):
            wrong = f"has {len(split)} rows for {len(problem.costs[op])} choices"
            raise ProblemError(wrong, fix="one row per choice", field=f"splits[{op}]")
        if split.size and split.min() < 1:
            wrong = f"holds {split.min()}"
            raise ProblemError(wrong, fix="split factors start at 1", field=f"splits[{op}]")


def _check_costs(costs: Floats, field: str) -> None:
    if costs.size and costs.min() >= -LARGEST and costs.max() <= LARGEST:
        return  # as most are; searches make problems by the thousand
    if np.isnan(costs).any():
        raise ProblemError("holds NaN", fix="use inf for a forbidden choice", field=field)
    finite = costs[np.isfinite(costs)]
    if np.isneginf(costs).any() or (finite.size and np.abs(finite).max() > LARGEST):
        raise ProblemError(
            f"holds {costs.min() if np.isneginf(costs).any() else finite[np.abs(finite).argmax()]}",
            fix=f"costs lie within {LARGEST:g} of zero, or are +inf for a forbidden choice",
            field=field,
        )


def _check_edges(problem: ShardingProblem) -> None:
    if len(problem.matrix_of) != len(problem.edges):
        wrong = f"has {len(problem.matrix_of)} entries for {len(problem.edges)} edges"
        raise ProblemError(wrong, fix="one matrix per edge", field="matrix_of")
    shapes = [matrix.shape for matrix in problem.matrices]
    counts = problem.num_choices
    for index, (src, dst) in enumerate(problem.edges):
        for op in (src, dst):
            if not 0 <= op < len(counts):
                wrong, fix = f"names op {op}", f"ops are 0 to {len(counts) - 1}"
                raise ProblemError(wrong, fix=fix, field=f"edges[{index}]")
        if src == dst:
            fix = "add the diagonal to the op's own costs instead"
            raise ProblemError(f"joins op {src} to itself", fix=fix, field=f"edges[{index}]")
        matrix = problem.matrix_of[index]
        if not 0 <= matrix < len(shapes):
            wrong, fix = f"names matrix {matrix}", f"there are {len(shapes)}, counted from 0"
            raise ProblemError(wrong, fix=fix, field=f"matrix_of[{index}]")
        needed = (counts[src], counts[dst])
        if shapes[matrix] != needed:
            raise ProblemError(
                f"joins ops {src} and {dst} of {needed[0]} and {needed[1]} choices by matrix "
                f"{matrix} of the shape {shapes[matrix]}",
                fix=f"the shape {needed} is needed",
                field=f"edges[{index}]",
            )


def _check_known(problem: ShardingProblem) -> None:
    cost = problem.known_cost
    if cost is not None and not math.isfinite(cost):
        raise ProblemError(f"is {cost}", fix="give the optimum or leave it out", field="known_cost")
    if problem.known is None:
        return
    violations = check(problem, problem.known)
    if violations:
        fix = "correct the recorded optimum or leave it out"
        raise ProblemError(violations[0], fix=fix, field="known")
    actual = _total(problem, problem.known.assignment)
    if cost is not None and not math.isclose(cost, actual, rel_tol=AGREEMENT):
        raise ProblemError(
            f"is {cost:g} where the recorded assignment costs {actual:g}",
            fix="correct one of the two or leave both out",
            field="known_cost",
        )


def _total(problem: ShardingProblem, chosen: tuple[int, ...]) -> float:
    total = sum(float(cost[choice]) for cost, choice in zip(problem.costs, chosen, strict=True))
    for (src, dst), index in zip(problem.edges, problem.matrix_of, strict=True):
        total += float(problem.matrices[index][chosen[src], chosen[dst]])
    return total


def _forbidden(problem: ShardingProblem, chosen: tuple[int, ...]) -> tuple[str, ...]:
    ops = tuple(
        f"{problem.name(op)} takes the forbidden choice {choice}"
        for op, choice in enumerate(chosen)
        if problem.costs[op][choice] == math.inf
    )
    pairs = tuple(
        f"{problem.name(src)} with choice {chosen[src]} and {problem.name(dst)} with choice "
        f"{chosen[dst]} are forbidden together"
        for (src, dst), index in zip(problem.edges, problem.matrix_of, strict=True)
        if problem.matrices[index][chosen[src], chosen[dst]] == math.inf
    )
    return ops + pairs


def _nulls(row: Floats) -> list[float | None]:
    return [None if cost == math.inf else cost for cost in row.tolist()]


def _infinities(rows: Any, field: str) -> Floats:
    """Rows of one length, with null read as forbidden."""
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        wrong = f"has rows of {min(lengths)} and of {max(lengths)} entries"
        raise ProblemError(wrong, fix="all rows need the same length", field=field)
    filled = [[math.inf if cost is None else cost for cost in row] for row in rows]
    return np.array(filled, dtype=np.float64).reshape(len(rows), max(lengths, default=0))


def _integers(rows: tuple[tuple[int, ...], ...], field: str) -> Ints:
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        wrong = f"has rows of {min(lengths)} and of {max(lengths)} entries"
        raise ProblemError(wrong, fix="all rows need the same length", field=field)
    if any(not 1 <= factor <= 2**31 for row in rows for factor in row):
        raise ProblemError("holds no split factor", fix="they start at 1", field=field)
    return np.array(rows, dtype=np.int64).reshape(len(rows), max(lengths, default=0))
