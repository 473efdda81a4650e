"""`partita accelerate`: the fastest way to run a model on this machine's GPU."""

from typing import Any

import click

from partita.cli.base import Output, OutputFile, common_options, output_option


@click.command()
@click.argument("model")
@click.option(
    "--batch", "-b", type=click.IntRange(1), default=1, show_default=True, help="Samples per call."
)
@click.option("--dtype", type=click.Choice(["f32", "f16", "bf16"]), help="Element type.")
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
    help="Seconds to search.",
)  # fmt: skip
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out of the comparison.")
@click.option("--in-process", is_flag=True, help="Try kernels here, not in child processes.")
@output_option(
    "Write what was decided (.json) here, for partita.accelerate(decided=...).", only_json=True
)
@common_options
def command(
    model: str, batch: int, dtype: str | None, time_limit: float, no_compile: bool,
    in_process: bool, output: OutputFile | None, out: Output, **_: Any,
) -> int:  # fmt: skip
    """Find the fastest way to run a MODEL on this machine's GPU.

    MODEL is a zoo name (inception_v3, nasnet_large@331) or file.py:function, which gives a PyTorch
    module and the arguments of a call.

    Tried are CUDA graphs over several streams, fused regions as persistent kernels, the sequential
    CUDA graph, torch.compile and the module as it is. Each is compared with the model in float64
    and timed as whole calls; the fastest that is right is kept. Kernels run for the first time in
    a child process, where a fault costs that candidate alone.
    """
    from partita.capture.installed import need_torch

    need_torch("running a model on a GPU")
    from partita.gpu.model import accelerate_of

    fast = accelerate_of(
        model, batch=batch, dtype=dtype, time_s=time_limit, compile=not no_compile,
        isolate=not in_process, seed=out.seed, note=out.note,
    )  # fmt: skip
    written = None
    if output is not None:
        path, force = output.path, output.force
        written = out.keep(path, lambda: fast.save(path, overwrite=force))
    out.show(str(fast.report()))
    if written is not None:
        out.show(f"written to {written}")
    out.result(
        {
            "format": "partita/result@1",
            "problem": model,
            "report": fast.report().to_json(),
            "plan": None if written is None else str(written),
        }
    )
    return 0
