"""Names for the values of one function, and which of them need none.

A value gets the name that the model's own statement gives it; operators of one statement are
written as one expression where that is short. What has no statement (a graph of the zoo, a model
typed into a shell) gets the noun of the layer or operator that makes it, and along a chain of
layers the name stays.
"""

from collections.abc import Mapping, Sequence

from partita.emit.calls import CheckpointSegment, Item, ModuleCall, is_again, reads
from partita.emit.local_names import Sentence, noun, role
from partita.emit.steps import EmittedValue, OpStep

CHAINED = ("x", "hidden", "out")  # names that stay while a value goes from layer to layer
MOST_FOLDED = 40  # characters of an expression within another


def sentence_of(item: Item) -> Sentence | None:
    """The statement of the function around it that an item stands in."""
    if isinstance(item, OpStep):
        return item.said[-1] if item.said else None
    if isinstance(item, CheckpointSegment):
        return None
    step = next((step for step in item.steps() if step.said), None)
    if step is None:
        return None
    places = [place for place, (key, _) in enumerate(step.stack) if key == item.key]
    return step.said[places[0]] if places else None


def outs_of(item: Item) -> list[EmittedValue | None]:
    """What an item gives, with None for what nobody asks for."""
    return list(item.outs) if isinstance(item, OpStep) else list(item.gives)


class Naming:
    """Statements of the items of one function: who belongs together, what it is called."""

    def __init__(self, items: Sequence[Item], last: Mapping[EmittedValue, int]) -> None:
        self.items = items
        self.last = last
        self.sentences = [sentence_of(item) for item in items]
        self.readers: dict[EmittedValue, list[int]] = {}
        for place, item in enumerate(items):
            for value in reads(item):
                self.readers.setdefault(value, []).append(place)
        self.hints: dict[EmittedValue, str] = {}
        self.ends = [0] * len(items)  # where the statement of an item is over
        begin = 0
        while begin < len(items):
            end = begin + 1
            while end < len(items) and self._together(begin, end):
                end += 1
            self.ends[begin:end] = [end] * (end - begin)
            self._name(begin, end)
            begin = end

    def _together(self, begin: int, place: int) -> bool:
        one, other = self.sentences[begin], self.sentences[place]
        return one is not None and other is not None and one.key == other.key

    def _name(self, begin: int, end: int) -> None:
        """Hints for what the items of one statement make."""
        sentence = self.sentences[begin]
        if sentence is None or not sentence.targets:
            return
        made = [out for item in self.items[begin:end] for out in outs_of(item) if out is not None]
        for item in self.items[begin:end]:
            outs = outs_of(item)
            if len(outs) > 1 and len(outs) == len(sentence.targets):
                pairs = zip(outs, sentence.targets, strict=True)
                self.hints.update((out, name) for out, name in pairs if out is not None and name)
            elif len(outs) > 1 and isinstance(item, ModuleCall):
                self.hints.update((out, out.word) for out in outs if out is not None and out.word)
        targets = [name for name in sentence.targets if name]
        escaping = [v for v in made if self.last.get(v, -1) >= end and v not in self.hints]
        if len(targets) == 1 and sentence.repeats:
            escaping = made
        elif len(targets) == 1:
            escaping = escaping[-1:]
        self.hints.update(zip(escaping, targets * len(made), strict=False))
        if len(targets) == 1 and sentence.is_code:
            self.hints.update((v, targets[0]) for v in made if self._is_on_the_way(v, end))

    def _is_on_the_way(self, value: EmittedValue, end: int) -> bool:
        """Is a value only what the next operator of its statement works on first?"""
        readers = self.readers.get(value, [])
        if len(readers) != 1 or readers[0] >= end:
            return False
        given = [v for v in reads(self.items[readers[0]]) if not v.is_state]
        return given[0] is value

    def reader(self, place: int) -> int | None:
        """The one item that reads what an item makes, if both are of one statement."""
        item, sentence = self.items[place], self.sentences[place]
        outs = outs_of(item)
        if sentence is None or len(outs) != 1 or outs[0] is None or sentence.repeats:
            return None
        if isinstance(item, CheckpointSegment) or (isinstance(item, OpStep) and item.is_list):
            return None
        readers = self.readers.get(outs[0], [])
        if len(readers) != 1 or self.last[outs[0]] != readers[0]:
            return None  # several, or the caller too
        after = readers[0]
        same = after < self.ends[place] and is_again(self.items[after]) == is_again(item)
        if not same or isinstance(self.items[after], CheckpointSegment):
            return None
        return after


def made_up(item: Item) -> str:
    """A name for what an item makes, out of what it is."""
    if isinstance(item, ModuleCall):
        return noun(item.path)
    if isinstance(item, OpStep):
        return noun(item.operator)
    return "hidden"


def has_role(item: Item) -> bool:
    """Does what an item makes deserve a name of its own, wherever it comes from?"""
    if isinstance(item, ModuleCall):
        return role(item.path) is not None
    sentence = sentence_of(item)
    name = sentence.key[0] if sentence is not None and not sentence.is_code else ""
    if isinstance(item, OpStep) and not name:
        name = item.operator
    return role(name) is not None


def argument_name(value: EmittedValue, depth: int, others: Sequence[EmittedValue]) -> str | None:
    """What the caller, `depth` modules deep, calls a value; or its maker, where it gives several"""
    sentence = _said_at(value, depth)
    shared = [v for v in others if v is not value and _said_at(v, depth) == sentence]
    if sentence is not None and len(sentence.targets) == 1 and sentence.targets[0] and not shared:
        return sentence.targets[0]
    return value.word or None


def _said_at(value: EmittedValue, depth: int) -> Sentence | None:
    place = min(depth, len(value.said) - 1)
    return value.said[place] if value.said else None
