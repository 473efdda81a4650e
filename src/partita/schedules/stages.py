"""A placement from the stages of a partition: real seconds, real bytes, real links.

Each stage becomes a forward block, a backward block that is its mirror image, and, where the time
of the weight gradients is known by itself, a weight block. Stages may share a device (a mixed
pipe), occupy several, and be joined in any order that has no cycle; a link costs what it takes to
send the activations forward and their gradients back. Parameters and optimizer states are not
here: they never change, so take them off the memory that is left for the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import ProblemError
from partita.schedules.placement import Block, Placement, number, whole


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage costs for one micro-batch on its device or devices.

    Without `backward_s` it is inference. `activation_bytes` is held from the start of the forward
    to the start of the backward; with `weight_s`, `weight_bytes` of it (all, if None) to the start
    of the weight gradients.
    """

    devices: int | tuple[int, ...]
    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0
    activation_bytes: float = 0
    weight_bytes: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class StageLink:
    """Stage `source` feeds stage `target`: seconds to send activations, and gradients back."""

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0


def placement_from_stages(
    stages: Sequence[StageCost],
    links: Sequence[StageLink] | None = None,
    num_devices: int | None = None,
    name: str = "",
) -> Placement:
    """The placement of stages; without links they form a chain that sends in no time."""
    if not stages:
        raise ProblemError("is empty", fix="give at least one stage", field="stages")
    names = _names(stages)
    training = _training(stages, names)
    if links is None:
        links = [StageLink(index, index + 1) for index in range(len(stages) - 1)]
    _check_links(links, len(stages))
    place = Placement(_num_devices(stages) if num_devices is None else num_devices, name, "s")
    for label, stage in zip(names, stages, strict=True):
        held = stage.activation_bytes if training else 0
        place.add(Block(f"F {label}", stage.forward_s, held), stage.devices)
    if training:
        for label, stage in zip(reversed(names), reversed(stages), strict=True):
            _add_backward(place, label, stage)
    for link in links:
        source, target = names[link.source], names[link.target]
        place.depends(f"F {source}", f"F {target}", link.forward_s)
        if training:
            place.depends(f"B {target}", f"B {source}", link.backward_s)
    if training:
        feeding = {link.source for link in links}
        for index, label in enumerate(names):
            if index not in feeding:
                place.depends(f"F {label}", f"B {label}")
    return place


def _add_backward(place: Placement, label: str, stage: StageCost) -> None:
    held = number(stage.activation_bytes, f"activation_bytes of {label}")
    kept = 0.0
    if stage.weight_s:
        kept = held if stage.weight_bytes is None else stage.weight_bytes
        if not 0 <= number(kept, f"weight_bytes of {label}") <= held:
            raise ProblemError(
                f"found {kept}, and the stage holds {held}",
                fix="give what the weight gradients need of the activations",
                field=f"weight_bytes of {label}",
            )
    place.add(Block(f"B {label}", stage.backward_s, kept - held, "backward"), stage.devices)
    if stage.weight_s:
        weight = Block(f"W {label}", stage.weight_s, -kept, "weight")
        place.add(weight, stage.devices, after=f"B {label}")


def _names(stages: Sequence[StageCost]) -> list[str]:
    names = [stage.name or f"stage{index}" for index, stage in enumerate(stages)]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(
                f"{name!r} is there twice", fix="give each stage a name of its own", field="stages"
            )
    return names


def _training(stages: Sequence[StageCost], names: Sequence[str]) -> bool:
    """Do all stages have a backward? None is inference, some is a mistake."""
    without = [name for name, stage in zip(names, stages, strict=True) if not stage.backward_s]
    if without and len(without) < len(stages):
        raise ProblemError(
            f"{without[0]} has no backward_s and others have",
            fix="give it to all stages, or to none for inference",
            field="stages",
        )
    for name, stage in zip(names, stages, strict=True):
        if number(stage.activation_bytes, f"activation_bytes of {name}") < 0:
            raise ProblemError(
                f"found {stage.activation_bytes}", fix="give at least zero",
                field=f"activation_bytes of {name}",
            )  # fmt: skip
    return not without


def _check_links(links: Sequence[StageLink], count: int) -> None:
    for link in links:
        for end in (link.source, link.target):
            if not 0 <= whole(end, "links") < count:
                raise ProblemError(
                    f"found stage {end}", fix=f"stages are 0 to {count - 1}", field="links"
                )


def _num_devices(stages: Sequence[StageCost]) -> int:
    """As many as it takes to have all that are named."""
    named = [
        device
        for stage in stages
        for device in ([stage.devices] if isinstance(stage.devices, int) else stage.devices)
    ]
    return max(named, default=0) + 1
