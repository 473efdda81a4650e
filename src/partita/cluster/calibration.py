"""What was measured of a machine, laid over its description: a calibration.

`partita compare-trace` writes one from a traced run; `plan` and `simulate` take it with
`--calibration FILE`, or as part of a cluster's name: `4xA100+calibration.json`. It goes by kinds of
devices and by links of equal figures, so that what two devices showed holds for sixty-four of them.

    op         roofline seconds x factor + launch_s, by phase and class of op ("forward product"),
               and seconds per FLOP and per byte besides, where ops were measured one by one: a CPU
               has no fast tiles, and what it takes does not follow the curve of a GPU
    update     seconds for each tensor that the optimizer updates, beside those for its bytes
    collective what each costs before a byte is moved, inside a node and across nodes, and the part
               of the bandwidth of messages that collectives reach; what a message by itself costs
    link       latency and bytes per second, for links of the figures that they had before

All else of the machine stays as it is. A calibrated machine has another fingerprint: plans say
which one they were made for.
"""

from dataclasses import asdict, dataclass, replace
from os import PathLike

from partita.cluster.record import Cluster
from partita.errors import ClusterError

KIND = "calibration"
FIXED_INSIDE = "collective inside a node"  # entries whose launch_s is a collective's fixed cost
FIXED_ACROSS = "collective across nodes"
# Their factor is the part of a message's bandwidth that collectives reach. A message by itself has
# a fixed cost of its own where a calibration tells one.
MESSAGE = "message"
PER_FLOP = "per FLOP"  # after a class: entries whose launch_s is what each costs besides
PER_BYTE = "per byte"
ISSUE = "start of a collective"  # its launch_s is what the host takes for it, on any link
PART = "part of an update"  # its launch_s is what the optimizer takes for each tensor
TAKEN_APART = "weight gradient apart"  # what each costs besides that is in a block of its own
OP_BY_OP = "op by op"  # after a phase: what each op costs besides in a stage that runs op by op


@dataclass(frozen=True, slots=True)
class OpScale:
    """Seconds of a class of ops: those of the roofline times `factor`, and `launch_s` each."""

    ops: str  # "forward product", "wgrad elementwise"
    factor: float
    launch_s: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf") or not 0 <= self.launch_s < float("inf"):
            raise ClusterError(
                f"has factor {self.factor:g} and launch_s {self.launch_s:g}",
                fix="a factor is above 0, a time at least 0",
                field=f"ops {self.ops!r}",
            )


@dataclass(frozen=True, slots=True)
class KindCalibration:
    """What devices of a kind were measured to take."""

    name: str
    ops: tuple[OpScale, ...]


@dataclass(frozen=True, slots=True)
class LinkCalibration:
    """Links that had these figures have those."""

    latency_s: float
    bytes_per_s: float
    measured_latency_s: float
    measured_bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.measured_latency_s < float("inf") or not (
            0 < self.measured_bytes_per_s < float("inf")
        ):
            raise ClusterError(
                f"measured {self.measured_latency_s:g} s and {self.measured_bytes_per_s:g} B/s",
                fix="a latency is at least 0, a bandwidth above 0",
                field="links",
            )


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that a run showed; `measured_on` says where."""

    measured_on: str
    kinds: tuple[KindCalibration, ...]
    links: tuple[LinkCalibration, ...] = ()
    interference: float | None = None  # of compute beside communication; costs do not use it

    def to_json(self) -> bytes:
        """The text of a `partita/calibration@1` file."""
        from partita.files import encode_json

        return encode_json({"format": f"partita/{KIND}@1", **asdict(self)})


def read_calibration(path: str | PathLike[str]) -> Calibration:
    """Read a calibration file."""
    from partita.files import read_bytes

    return calibration_of(read_bytes(str(path)), str(path))


def calibration_of(data: bytes, file: str = "") -> Calibration:
    """The calibration in the bytes of a file."""
    from partita.files import record_of

    return record_of(data, KIND, Calibration, file=file)


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with what was measured; refused where it has none of the kinds."""
    kinds = {each.name: each for each in calibration.kinds}
    if not any(kind.name in kinds for kind in cluster.kinds):
        raise ClusterError(
            f"the calibration is of {', '.join(kinds)}, and {cluster.name} has "
            f"{', '.join(kind.name for kind in cluster.kinds)}",
            fix="calibrate on a device of this kind",
            field="calibration",
        )
    links = {(each.latency_s, each.bytes_per_s): each for each in calibration.links}
    return replace(
        cluster,
        kinds=tuple(
            replace(kind, measured=_entries(kinds[kind.name])) if kind.name in kinds else kind
            for kind in cluster.kinds
        ),
        links=tuple(
            link
            if (own := links.get((link.latency_s, link.bytes_per_s))) is None
            else replace(
                link, latency_s=own.measured_latency_s, bytes_per_s=own.measured_bytes_per_s
            )
            for link in cluster.links
        ),
    )


def _entries(kind: KindCalibration) -> tuple[tuple[str, float, float], ...]:
    return tuple((each.ops, each.factor, each.launch_s) for each in kind.ops)
