"""Step time, memory and MFU of a transformer under a strategy given by name, with an interval.

`forecast(transformer, machine, strategy)` answers in about a millisecond: the repeated layer is
priced once. The parameters (how much of its peak a kind of device reaches, what a launch costs on
the host, how overlapped communication slows computing) are those of `costs/physics.py`.
"""

from partita.forecast.compare import equal, ranked
from partita.forecast.inputs import (
    SCHEDULES,
    ExpertLayers,
    Latent,
    Machine,
    Strategy,
    Transformer,
    check_divisions,
    check_strategy,
    machine_of,
)
from partita.forecast.memory import MemoryParts
from partita.forecast.predict import Forecast, forecast

__all__ = [
    "SCHEDULES",
    "ExpertLayers",
    "Forecast",
    "Latent",
    "Machine",
    "MemoryParts",
    "Strategy",
    "Transformer",
    "check_divisions",
    "check_strategy",
    "equal",
    "forecast",
    "machine_of",
    "ranked",
]
