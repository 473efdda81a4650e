"""What a child process does for `partita.accelerate`: a search, whose decisions are the answer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from partita.gpu.rtasks.api import rtasks
from partita.gpu.step_times import StepTimes
from partita.gpu.streams.candidates import Options
from partita.gpu.streams.choose import Chooser

T = torch.Tensor
STREAMS, RTASKS = (f"{__name__}:{name}" for name in ("search_streams", "search_rtasks"))


def search_streams(
    module: nn.Module, inputs: tuple[T, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The schedule that the search over streams keeps."""
    chooser = Chooser(module, inputs, Options(**options), StepTimes(), lambda text: None)
    return chooser.choose()[1].to_json()


def search_rtasks(
    module: nn.Module, inputs: tuple[T, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What came of fusing; plans and kernels are in the user's cache folder afterwards."""
    return rtasks(module, inputs, **options).report().to_json()
