"""What the user has decided or ruled out before the search: `--pin` and `--forbid`.

    pp=4    vpp=2    dp=8    tp=2    cp=1    ep=1    sp=yes
    micro-batches=16    schedule=1f1b    recompute=selective    mesh=16x8    zero=1
    micro-batch=2 (samples of one replica in one micro-batch; with dp)
    hsdp=8 (replicas that one copy of the parameters is sharded over; zero=3 unless pinned)
    grad-dtype=f32    matmul-dtype=fp8    execution=compiled
    cut=modules (stages begin between the blocks of the model) or anywhere
    shape=m (the first ops on all devices together, then a stage on each), nn (and ops halfway), k
    (two branches on devices of their own, which meet on all) or line (nothing on all devices)

A pin leaves one value of that decision, a ban all others. Degrees are those that a plan's summary
prints (`degrees.py`). Two constraints that contradict each other are refused, both named.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.costs.sharding import LEVELS
from partita.errors import InputError
from partita.graph.record import FLOATS
from partita.plans import CHECKPOINTING, EXECUTIONS, ZERO_STAGES
from partita.schedules.named import NAMED
from partita.suggest import suggest

DEGREES = ("dp", "tp", "cp", "ep")  # of the axes of a mesh
DECISIONS = (
    "pp", "vpp", *DEGREES, "sp", "micro-batch", "micro-batches", "schedule", "recompute", "mesh",
    "cut", "shape", "zero", "hsdp", "grad-dtype", "matmul-dtype", "execution",
)  # fmt: skip
# How a model is computed, which a plan carries: what it is unless something else is asked for, and
# what it is where that is forbidden.
COMPUTED = ("grad-dtype", "matmul-dtype", "execution")
INSTEAD = {
    "grad-dtype": ("f32",),
    "matmul-dtype": ("f8",),
    "execution": ("graph", "compiled", "eager"),
}
COUNTS = ("pp", "vpp", *DEGREES, "micro-batch", "micro-batches", "hsdp")
FLAGS = {
    **dict.fromkeys(("yes", "true", "on", "1"), "yes"),
    **dict.fromkeys(("no", "false", "off", "0"), "no"),
}
TYPES = (*FLOATS, "tf32", "f4")
NARROW = {"fp8": "f8", "fp4": "f4", "fp16": "f16", "fp32": "f32"}  # as others write them
# Keys of `partita simulate` that are no decision of a plan, and what there is instead.
ELSEWHERE = {
    "layers": "a plan is cut where that is fastest: pin pp; partita simulate --layers forecasts",
    "attention": "a plan's attention is one fused kernel: partita simulate --attention forecasts",
    "dropout": "ops are those of the model: partita simulate --dropout forecasts",
    "dtype": "write --dtype",
    "batch": "write --batch",
}
SHARED_SHAPES = ("m", "nn", "k")  # with stages that groups of devices share
LINE_SHAPE, OTHER_SHAPE = "line", "other"  # without; with others than these
WHOLE_BLOCKS, ANYWHERE = "modules", "anywhere"  # where a model is cut
SEARCHED = "searched"  # what a plan calls an order that was found for its stages
EARLIER = {"stages": "pp", "microbatches": "micro-batches", "sharded": "zero"}
EARLIER_ZERO = {"none": "0", "states": "1", "gradients": "2", "parameters": "3"}
EARLIER_RECOMPUTE = {
    "no": "none", "off": "none", "false": "none", "light": "selective", "yes": "full",
    "on": "full", "true": "full",
}  # fmt: skip


@dataclass(frozen=True)
class Constraints:
    """Values that must be, and values that must not."""

    pinned: tuple[tuple[str, str], ...] = ()
    banned: tuple[tuple[str, str], ...] = ()

    def allow(self, decision: str, value: object) -> bool:
        """May a decision have this value?"""
        text = _text(value)
        if any(key == decision and text != wanted for key, wanted in self.pinned):
            return False
        return (decision, text) not in self.banned

    def allow_order(self, name: str, num_groups: int) -> bool:
        """May stages on so many groups of devices run in this order?

        One group has nothing to order: a pinned order asks for more, a ban means none of them.
        """
        if num_groups == 1:
            return self.pinned_to("schedule") is None
        return self.allow("schedule", name)

    def pinned_to(self, decision: str) -> str | None:
        """The value a decision must have, if one was named."""
        return dict(self.pinned).get(decision)

    def __bool__(self) -> bool:
        return bool(self.pinned or self.banned)

    def __str__(self) -> str:
        pins = [f"{key}={value}" for key, value in self.pinned]
        return ", ".join((*pins, *(f"not {key}={value}" for key, value in self.banned)))


def parse_constraints(pins: Iterable[str] = (), bans: Iterable[str] = ()) -> Constraints:
    """The constraints in texts such as `pp=4`."""
    pinned: dict[str, str] = {}
    for text in pins:
        key, value = _parse(text, "pin")
        if pinned.get(key, value) != value:
            raise InputError(
                f"{key}={pinned[key]} and {key}={value} contradict each other",
                fix="keep one of the two",
                field="pin",
            )
        pinned[key] = value
    banned = []
    for text in bans:
        key, value = _parse(text, "forbid")
        if pinned.get(key) == value:
            raise InputError(
                f"--pin {key}={value} and --forbid {key}={value} contradict each other",
                fix="keep one of the two",
                field="forbid",
            )
        banned.append((key, value))
    return Constraints(tuple(pinned.items()), tuple(banned))


@dataclass(frozen=True, slots=True)
class Computation:
    """How a model is computed, as far as it is asked for; '' is the model's own type."""

    grad_dtype: str = ""
    matmul_dtype: str = ""
    execution: str = "graph"


def computation(constraints: Constraints, dtype: str) -> Computation:
    """What is pinned of how a model in `dtype` is computed, or what is left where it is banned."""
    usual = {"grad-dtype": dtype, "matmul-dtype": dtype, "execution": "graph"}
    chosen = {}
    for key, own in usual.items():
        banned = {value for name, value in constraints.banned if name == key}
        wanted = constraints.pinned_to(key)
        left = [value for value in (own, *INSTEAD[key]) if value not in banned]
        if wanted is None and not left:
            raise InputError(
                f"{' and '.join(f'{key}={value}' for value in sorted(banned))} are ruled out, and "
                "nothing else is left",
                fix=f"allow one, or pin {key}",
                field="forbid",
            )
        value = wanted or left[0]
        chosen[key] = "" if value == own and key != "execution" else value
    return Computation(chosen["grad-dtype"], chosen["matmul-dtype"], chosen["execution"])


def settled(constraints: Constraints) -> Constraints:
    """The constraints on decisions of a search; shard groups of replicas shard parameters."""
    pinned = {key: value for key, value in constraints.pinned if key not in COMPUTED}
    banned = tuple(pair for pair in constraints.banned if pair[0] not in COMPUTED)
    group, replicas = pinned.get("hsdp"), pinned.get("dp")
    if group is not None:
        if pinned.setdefault("zero", "3") == "0" or group == "1":
            raise InputError(
                f"hsdp={group} says over how many replicas a copy of the parameters is sharded, "
                f"and {'zero=0' if pinned['zero'] == '0' else 'one replica'} shards nothing",
                fix="pin zero=1, 2 or 3 and hsdp=2 or more, or leave hsdp out",
                field="pin",
            )
        if ("zero", pinned["zero"]) in banned:
            raise InputError(
                f"hsdp={group} is with zero=3 unless another stage is pinned, and zero=3 is "
                "forbidden",
                fix="pin zero=1 or zero=2 beside it",
                field="pin",
            )
        if replicas is not None and int(replicas) % int(group):
            raise InputError(
                f"hsdp={group} does not divide dp={replicas}",
                fix="choose a divisor",
                field="pin",
            )
    return Constraints(tuple(pinned.items()), banned)


def zero_levels(constraints: Constraints) -> tuple[int, ...]:
    """The ZeRO stages that a search may choose from."""
    wanted = constraints.pinned_to("zero")
    if wanted is not None:
        return (int(wanted),)
    left = tuple(level for level in LEVELS if constraints.allow("zero", level))
    if not left and not constraints.allow("zero", 2):
        raise InputError("every ZeRO stage is ruled out", fix="allow one", field="forbid")
    return left or (2,)


def counted(constraints: Constraints, batch: int) -> Constraints:
    """Sizes of micro-batches as numbers of them: a batch is their number times size times dp."""
    pinned = dict(constraints.pinned)
    size = pinned.pop("micro-batch", None)
    if size is not None:
        count = _number(size, pinned.get("dp"), batch, "pin")
        if pinned.setdefault("micro-batches", count) != count:
            raise InputError(
                f"micro-batch={size} with dp={pinned['dp']} and a batch of {batch} are {count} "
                f"micro-batches, which contradicts micro-batches={pinned['micro-batches']}",
                fix="keep one of the two",
                field="pin",
            )
    banned = tuple(
        ("micro-batches", _number(value, pinned.get("dp"), batch, "forbid"))
        if key == "micro-batch"
        else (key, value)
        for key, value in constraints.banned
    )
    return Constraints(tuple(pinned.items()), banned)


def _number(size: str, dp: str | None, batch: int, field: str) -> str:
    if dp is None:
        raise InputError(
            f"micro-batch={size} says how many samples a replica takes at a time, and not how many "
            "replicas there are",
            fix=f"add --pin dp=N, or write micro-batches={max(1, batch // int(size))}",
            field=field,
        )
    count, rest = divmod(batch, int(size) * int(dp))
    if rest or not count:
        raise InputError(
            f"micro-batch={size} times dp={dp} does not divide the batch of {batch}",
            fix="change one of these",
            field=field,
        )
    return str(count)


def _parse(text: str, field: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip().lower()
    if key in EARLIER and equals:
        new = f"{EARLIER[key]}={EARLIER_ZERO.get(value, value)}"
        raise InputError(f"found {text!r}", fix=f"write {new}", field=field)
    if key in ELSEWHERE and equals:
        raise InputError(f"found {text!r}", fix=ELSEWHERE[key], field=field)
    if key not in DECISIONS or not equals:
        fix = suggest(key, DECISIONS) if equals else f"write one of {', '.join(DECISIONS)}=value"
        raise InputError(f"found {text!r}", fix=fix, field=field)
    if key in COUNTS:
        if not value.isdecimal() or int(value) < 1:
            raise InputError(f"found {text!r}", fix="give a whole number from 1 on", field=field)
        value = str(int(value))
        if field == "forbid" and key in DEGREES and value == "1":
            raise InputError(
                f"found {text!r}, which leaves all other degrees",
                fix=f"pin the degree that is wanted: --pin {key}=2",
                field=field,
            )
    elif key == "sp":
        if value not in FLAGS:
            raise InputError(f"found {text!r}", fix="write sp=yes or sp=no", field=field)
        value = FLAGS[value]
    elif key == "recompute":
        if value not in CHECKPOINTING:
            known = EARLIER_RECOMPUTE.get(value)
            fix = f"write recompute={known}" if known else suggest(value, CHECKPOINTING)
            raise InputError(f"found {text!r}", fix=fix, field=field)
    elif key == "schedule":
        _check_schedule(text, value, field)
    elif key in COMPUTED:
        values = EXECUTIONS if key == "execution" else TYPES
        value = NARROW.get(value, value)
        if value not in values:
            raise InputError(f"found {text!r}", fix=suggest(value, values), field=field)
    elif key == "shape" and value not in (*SHARED_SHAPES, LINE_SHAPE):
        fix = f"write shape={', shape='.join(SHARED_SHAPES)} or shape={LINE_SHAPE}"
        raise InputError(f"found {text!r}", fix=fix, field=field)
    elif key == "cut" and value not in (WHOLE_BLOCKS, ANYWHERE):
        raise InputError(f"found {text!r}", fix="write cut=modules or cut=anywhere", field=field)
    elif key == "zero" and value not in map(str, ZERO_STAGES):
        raise InputError(f"found {text!r}", fix="give a ZeRO stage from 0 to 3", field=field)
    elif key == "mesh" and not all(part.isdecimal() and int(part) for part in value.split("x")):
        raise InputError(f"found {text!r}", fix="write sizes such as 16x8", field=field)
    return key, value


def _check_schedule(text: str, value: str, field: str) -> None:
    """Orders by name; one that is searched for the stages of a plan can only be ruled out."""
    if value == SEARCHED and field == "pin":
        raise InputError(
            f"found {text!r}, but an order is searched only where it beats the named ones",
            fix="leave the schedule out",
            field=field,
        )
    if value not in (*NAMED, SEARCHED):
        raise InputError(f"found {text!r}", fix=suggest(value, (*NAMED, SEARCHED)), field=field)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)
