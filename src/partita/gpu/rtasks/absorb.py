"""Drafts that go into others: fewer tiles, fewer values to write and to wait for.

    aliases    who reads another shape of a matrix reads the matrix
    scales     scale and shift per column after a product go into its weights
    weights    a factor per column goes into the norm it follows
    acts       an activation goes into what makes its input
    residuals  a sum of two goes into the product or window that makes one of them
    chains     an expression goes into the only expression that reads it

Only where nobody else reads what disappears. The merged draft stands where the later one stood:
everything that it reads is there by then.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from partita.gpu.rtasks.drafts import OUTSIDE, Draft, Values, Weight
from partita.gpu.rtasks.lower_chain import MOST_READS, MOST_WIDE, Operand
from partita.gpu.rtasks.tileops import ACTS

ACTIVE = ("gemv", "conv", "window", "combine")
ADDING = ("gemv", "conv", "window")
MOST_LINES = 48  # of one expression

Merge = Callable[[Draft, Draft, Values], Draft | None]


def absorb(drafts: Sequence[Draft], values: Values, outputs: Sequence[str]) -> list[Draft]:
    """All passes; one after the other until nothing changes."""
    kept = _aliases(drafts, values, outputs)
    for merges in ((_scale, _weight, _act, _residual), (_chain,)):
        count = -1
        while count != len(kept):
            count = len(kept)
            for merge in merges:
                kept = _pass(kept, values, outputs, merge)
    return kept


def _aliases(drafts: Sequence[Draft], values: Values, outputs: Sequence[str]) -> list[Draft]:
    """Readers of an alias take over its step, for when they run unfused."""
    alias: dict[str, Draft] = {}
    kept = []
    for draft in drafts:
        if draft.kind not in OUTSIDE:
            draft = _seen_through(draft, alias)
        if draft.kind == "part" and _alike(values, draft.name, draft.reads[0]):
            alias[draft.name] = draft
        kept.append(draft)
    read = {name for draft in kept for name in draft.reads} | set(outputs)
    return [draft for draft in kept if draft.name not in alias or draft.name in read]


def _seen_through(draft: Draft, alias: dict[str, Draft]) -> Draft:
    steps = [step for name in draft.reads if name in alias for step in alias[name].steps]
    reads = tuple(alias[name].reads[0] if name in alias else name for name in draft.reads)
    return replace(draft, reads=reads, steps=(*steps, *draft.steps))


def _pass(drafts: list[Draft], values: Values, outputs: Sequence[str], merge: Merge) -> list[Draft]:
    readers = Counter(name for draft in drafts for name in draft.reads)
    made: dict[str, Draft] = {}
    for draft in drafts:
        for name in dict.fromkeys(draft.reads):
            source = made.get(name)
            if source is None or readers[name] != 1 or name in outputs or source.also:
                continue
            merged = merge(source, draft, values)
            if merged is not None:
                del made[source.name]
                draft = replace(merged, steps=(*source.steps, *draft.steps))
                break
        made[draft.name] = draft
    return list(made.values())


def _alike(values: Values, *names: str) -> bool:
    return len({values.matrix(name) for name in names}) == 1


def _scale(source: Draft, draft: Draft, values: Values) -> Draft | None:
    """(x W + b) s + t = x (W s) + (b s + t)."""
    lines = (("mul", "r0", "w0"), ("add", "s0", "w1"))
    if draft.kind != "chain" or draft.attrs["steps"] != lines or len(draft.wide) != 2:
        return None
    if source.kind not in ("gemv", "conv") or source.attrs["act"] or len(source.reads) != 1:
        return None
    scale, shift = draft.wide
    assert scale is not None
    assert shift is not None
    weight, bias = source.weights[0].value, source.wide[0]
    shape = (-1, *(1 for _ in weight.shape[1:]))
    scaled = (weight.double() * scale.double().view(shape)).to(weight.dtype)
    moved = shift.double() if bias is None else bias.double() * scale.double() + shift.double()
    return replace(
        source, name=draft.name, weights=(Weight(scaled, source.weights[0].tf32),),
        wide=(moved.float(), *source.wide[1:]),
    )  # fmt: skip


def _weight(source: Draft, draft: Draft, values: Values) -> Draft | None:
    if source.kind != "rows" or draft.kind != "chain" or source.attrs["fn"] == "softmax":
        return None
    if draft.attrs["steps"] not in ((("mul", "r0", "w0"),), (("mul", "w0", "r0"),)):
        return None
    if any(each is not None for each in source.wide):
        return None
    return replace(source, name=draft.name, wide=(draft.wide[0], None))


def _act(source: Draft, draft: Draft, values: Values) -> Draft | None:
    if draft.kind == "combine":
        plain = draft.attrs["factors"] == (1.0,) and draft.wide == (None, None)
        fn = draft.attrs["act"] if plain else ""
    elif draft.kind == "chain" and len(draft.attrs["steps"]) == 1:
        line = draft.attrs["steps"][0]
        fn = line[0] if line[1:] == ("r0",) else ""
    else:
        return None
    if fn not in ACTS[1:] or source.kind not in ACTIVE or source.attrs["act"]:
        return None
    if not _alike(values, source.name, draft.name):
        return None
    return replace(source, name=draft.name, attrs={**source.attrs, "act": fn})


def _residual(source: Draft, draft: Draft, values: Values) -> Draft | None:
    if len(draft.reads) != 2 or source.kind not in ADDING:
        return None
    act = ""
    if draft.kind == "combine":
        if draft.attrs["factors"] != (1.0, 1.0) or draft.wide != (None, None):
            return None
        act = draft.attrs["act"]
    elif draft.kind != "chain" or draft.attrs["steps"] != (("add", "r0", "r1"),):
        return None
    if source.attrs["act"] or len(source.reads) != 1:
        return None
    other = next(name for name in draft.reads if name != source.name)
    if draft.constants or not _alike(values, source.name, other, draft.name):
        return None
    return replace(
        source, name=draft.name, reads=(*source.reads, other), attrs={**source.attrs, "act": act}
    )


def _chain(source: Draft, draft: Draft, values: Values) -> Draft | None:
    """Write the lines of the source before those of its reader."""
    if source.kind != "chain" or draft.kind != "chain":
        return None
    if not _alike(values, source.name, draft.name):
        return None
    lines = [*source.attrs["steps"]]
    reads, wide = [*source.reads], [*source.wide]
    last = f"s{len(lines) - 1}"
    place: dict[Operand, Operand] = {}
    for index, name in enumerate(draft.reads):
        if name == source.name:
            place[f"r{index}"] = last
            continue
        if name not in reads:
            reads.append(name)
        place[f"r{index}"] = f"r{reads.index(name)}"
    for index, vector in enumerate(draft.wide):
        place[f"w{index}"] = f"w{len(wide)}"
        wide.append(vector)
    for index in range(len(draft.attrs["steps"])):
        place[f"s{index}"] = f"s{len(lines) + index}"
    lines += [(fn, *(place.get(o, o) for o in operands)) for fn, *operands in draft.attrs["steps"]]
    if len(reads) > MOST_READS or len(wide) > MOST_WIDE or len(lines) > MOST_LINES:
        return None
    return replace(
        draft, reads=tuple(reads), attrs={"steps": tuple(lines)}, wide=tuple(wide),
        constants=(*source.constants, *draft.constants),
    )  # fmt: skip
