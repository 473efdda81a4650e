"""What the user has decided or ruled out before the search: `--pin` and `--forbid`.

    pp=4    vpp=2    dp=8    tp=2    cp=1    ep=1    sp=yes
    micro-batches=16    schedule=1f1b    recompute=selective    mesh=16x8    zero=1
    micro-batch=2 (samples of one replica in one micro-batch; with dp)

A pin leaves one value of that decision, a ban all others. Degrees are those that a plan's summary
prints (`degrees.py`). Two constraints that contradict each other are refused, both named.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.costs.physics import EXECUTIONS
from partita.errors import InputError
from partita.graph.dtypes import FLOATS
from partita.plans import CHECKPOINTING, ZERO_STAGES
from partita.schedules.named import NAMED
from partita.suggest import suggest

DEGREES = ("dp", "tp", "cp", "ep")  # of the axes of a mesh
DECISIONS = (
    "pp", "vpp", *DEGREES, "sp", "micro-batch", "micro-batches", "schedule", "recompute", "mesh",
    "zero", "hsdp", "grad-dtype", "matmul-dtype", "execution",
)  # fmt: skip
# What a forecast of `partita simulate` can vary and a plan cannot: its only value, and why.
FIXED = {
    "grad-dtype": "a plan adds gradients up in the type of the parameters",
    "matmul-dtype": "a plan's products are in the type of the model",
    "execution": "a plan is made for kernels in CUDA graphs",
}
INSTEAD = {
    "grad-dtype": (
        "plan with --dtype {value}, or forecast it: partita simulate --grad-dtype {value}"
    ),
    "matmul-dtype": (
        "plan with --dtype {value}, or forecast it: partita simulate --matmul-dtype {value}"
    ),
    "execution": "time the plan: partita simulate plan.json --execution {value}",
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


def settled(constraints: Constraints, dtype: str) -> Constraints:
    """The constraints without what every plan of a model in `dtype` does; refuses what none does.

    Sharding over all replicas of a pinned dp is ZeRO stage 3; over fewer is no plan yet.
    """
    pinned = dict(constraints.pinned)
    banned = tuple(pair for pair in constraints.banned if pair[0] not in (*FIXED, "hsdp"))
    for key, only in {"grad-dtype": dtype, "matmul-dtype": dtype, "execution": "graph"}.items():
        value = pinned.pop(key, only)
        if value != only:
            raise InputError(
                f"{key}={value}, but {FIXED[key]} ({only})",
                fix=INSTEAD[key].format(value=value), field="pin",
            )  # fmt: skip
        if (key, only) in constraints.banned:
            raise InputError(
                f"{key}={only} is ruled out, but {FIXED[key]} ({only})", fix="leave it out",
                field="forbid",
            )  # fmt: skip
    shards = pinned.pop("hsdp", None)
    if shards is not None:
        if pinned.get("dp") != shards:
            raise InputError(
                f"hsdp={shards} replicates over a part of the replicas, and a plan shards over all",
                fix=f"pin zero=3 (with dp={shards} it is the same), or forecast it: partita "
                f"simulate --hsdp {shards}",
                field="pin",
            )
        if pinned.setdefault("zero", "3") != "3":
            raise InputError(
                f"hsdp={shards} and zero={pinned['zero']} contradict each other: parameters that "
                "are sharded are ZeRO stage 3",
                fix="keep one of the two",
                field="pin",
            )
    return Constraints(tuple(pinned.items()), banned)


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
    elif key in FIXED:
        values = EXECUTIONS if key == "execution" else TYPES
        value = NARROW.get(value, value)
        if value not in values:
            raise InputError(f"found {text!r}", fix=suggest(value, values), field=field)
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
