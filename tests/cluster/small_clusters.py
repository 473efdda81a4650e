"""Small clusters to test with, made by hand or drawn by Hypothesis."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from partita.cluster import Cluster, Device, DeviceKind, Link

# a busy machine must not fail a test
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

KIND = DeviceKind("gpu", "gpu", (("f32", 1e12),), memory_bytes=2**30, memory_bytes_per_s=1e11)


def cables(*ends):
    """Both directions of each (a, b, latency_s, bytes_per_s)."""
    return tuple(
        Link(source, target, latency_s, bytes_per_s)
        for a, b, latency_s, bytes_per_s in ends
        for source, target in ((a, b), (b, a))
    )


def cluster(num_devices, links, switches=(), kind=KIND):
    devices = tuple(Device(f"d{index}", kind.name, "n") for index in range(num_devices))
    return Cluster("test", (kind,), devices, tuple(switches), tuple(links))


def ring(num_devices, latency_s=1e-6, bytes_per_s=1e9):
    pairs = [(f"d{i}", f"d{(i + 1) % num_devices}") for i in range(num_devices)]
    return cluster(num_devices, cables(*((a, b, latency_s, bytes_per_s) for a, b in pairs)))


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=6
).filter(str.isprintable)
BANDWIDTHS = st.sampled_from([1e9, 2e9, 2e10]) | st.floats(1.0, 1e15)
LATENCIES = st.sampled_from([0.0, 1e-6, 1e-4]) | st.floats(0.0, 1.0)


@st.composite
def kinds(draw, name):
    cache_bytes = draw(st.sampled_from([0, 2**20]))
    extra = draw(st.lists(st.sampled_from(["f64", "tf32", "f16", "bf16", "f8", "i8"]), unique=True))
    rates = tuple((dtype, draw(st.floats(1.0, 1e16))) for dtype in ("f32", *extra))
    return DeviceKind(
        name,
        draw(st.sampled_from(["gpu", "cpu", "tpu"])),
        rates,
        memory_bytes=draw(st.integers(1, 2**50)),
        memory_bytes_per_s=draw(BANDWIDTHS),
        cache_bytes=cache_bytes,
        cache_bytes_per_s=draw(BANDWIDTHS) if cache_bytes else 0.0,
        launch_s=draw(LATENCIES),
        num_units=draw(st.integers(1, 1000)),
        shared_bytes_per_unit=draw(st.integers(0, 2**20)),
        registers_per_unit=draw(st.integers(0, 2**20)),
        source=draw(st.text(st.characters(codec="utf-8"), max_size=10)),
    )


@st.composite
def clusters(draw, max_vertices=6):
    """Any connected cluster: a one-way ring through all vertices and some more links."""
    names = draw(st.lists(NAMES, min_size=1, max_size=max_vertices, unique=True))
    num_devices = draw(st.integers(1, len(names)))
    kind_names = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    order = draw(st.permutations(names))
    ends = list(zip(order, order[1:] + order[:1], strict=True)) if len(names) > 1 else []
    if len(names) > 1:
        pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
        ends += draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=8))
    links = tuple(
        Link(a, b, draw(LATENCIES), draw(BANDWIDTHS), draw(st.just("") | NAMES)) for a, b in ends
    )
    devices = tuple(
        Device(name, draw(st.sampled_from(kind_names)), draw(st.just("") | NAMES))
        for name in names[:num_devices]
    )
    return Cluster(
        draw(NAMES),
        tuple(draw(kinds(name)) for name in kind_names),
        devices,
        tuple(names[num_devices:]),
        links,
    )
