"""Place models of the zoo on machines of heterogeneous devices: the step against the best single
device.

python benchmarks/place_zoo.py [--time-limit 2] [--method heft] [--models alexnet,gpt2] [--all]
"""

import argparse
import time

from partita.jobs.place import place
from partita.search.base import Stop
from partita.units import seconds, table
from partita.zoo import MODELS

SOME = ("alexnet", "resnet50", "inception_v3", "densenet121", "vgg16", "unet", "gpt2", "t5")
CLUSTERS = ("malvik", "2xA100+2xV100")


def main() -> None:
    """Print a table: a row per model and machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=2.0)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--models", default=",".join(SOME))
    parser.add_argument("--all", action="store_true", help="the whole zoo")
    parser.add_argument("--infer", action="store_true")
    given = parser.parse_args()
    rows = []
    for model in MODELS if given.all else given.models.split(","):
        for cluster in CLUSTERS:
            begun = time.process_time()
            stop = Stop(time_s=given.time_limit)
            placed = place(model, cluster, method=given.method, stop=stop, training=not given.infer)
            spent = time.process_time() - begun
            alone = [x.step_s for x in placed.tried if x.name.startswith("all on") and x.fits]
            best = placed.best
            rows.append(
                (
                    model,
                    cluster,
                    "none" if best is None else seconds(best.step_s),
                    f"{min(alone) / best.step_s:.2f}" if alone and best else "",
                    f"{best.num_devices}" if best else "",
                    f"{placed.gap:.0%}" if placed.gap is not None else "",
                    f"{spent:.1f}",
                )
            )
            print(*rows[-1], flush=True)
    header = ("model", "machine", "step", "over one device", "devices", "gap", "CPU s")
    print(table(header, rows, numbers=(2, 3, 4, 5, 6)))


if __name__ == "__main__":
    main()
