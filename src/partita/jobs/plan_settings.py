"""What `plan` decides beside the joint search, whose own settings are the fields of `Auto`."""

from dataclasses import dataclass

from partita.jobs.frameworks import USUAL_FIELD, FieldSettings
from partita.jobs.strategies import USUAL_PIPELINES, PipelineSettings


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """How far to look for changes that would make a model fit; each kind of them by itself."""

    seconds: float = 20.0  # of this process, for each kind of advice; the largest models need 2
    more_memory: tuple[float, ...] = (1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)  # times what there is
    halvings: int = 3  # between the last that was too little and the first that was enough
    more_devices: tuple[int, ...] = (2, 4, 8, 16)  # times what there are
    most_devices: int = 1024  # in all
    batches: int = 6  # smaller ones, the largest first
    groupings: int = 3  # of the devices: so many, evenly from all
    filled: tuple[float, ...] = (1.0, 0.9, 0.75, 0.5)  # of the memory, by what may fit as it is
    rounding: float = 1.005  # a peak is told a little larger, to be shown rounded


@dataclass(frozen=True, slots=True)
class ShapeSettings:
    """How plans in an M shape are tried (`plan_candidates.py`)."""

    shared: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)  # of the arithmetic, on all devices
    microbatches: int = 4  # for each device, about
    ordered: int = 4  # of the best, with an order searched for each
    beside: int = 2  # of the parts above, beside a pipeline that won
    gain: float = 0.3  # that a searched order may bring at most, as far as was seen
    most_devices: int = 8  # on more, orders take long to search


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of `plan`: named strategies, searched orders, and what is told in the end."""

    # Named strategies. Of a small model all of one stage are simulated before the search.
    small_ops: int = 1000  # a model of up to so many ops, backward and updates included, is small
    first: tuple[str, ...] = ("data", "zero1", "fsdp")  # of a large one, until one of these fits
    small_devices: int = 64  # a small model on so many: the sharding search is asked as well

    pipelines: PipelineSettings = USUAL_PIPELINES  # those that people build by hand
    field: FieldSettings = USUAL_FIELD  # families of frameworks, tuned over their degrees
    field_plans: int = 3  # of all of them, those with the shortest forecasts are simulated
    field_tried: int = 40  # that are looked at until so many keep to the constraints

    # Orders that are searched for exactly the stages of a plan.
    largest_order: int = 160  # blocks in all: beyond, published orders are tried only
    order_method: str = "auto"  # of the schedule searches
    order_fills: float = 0.98  # of the memory
    order_reserve_bytes: float = 2**30  # of that, left for what is live only for a moment

    shapes: ShapeSettings = ShapeSettings()

    # Stages that begin inside of a block of the model must be faster by more than this.
    whole_blocks: float = 0.005

    # What is told.
    next_best: int = 10  # other plans that are listed
    advice: AdviceSettings = AdviceSettings()


USUAL = PlanSettings()
