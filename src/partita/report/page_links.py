"""The part of a plan's page on communication: who sends how much to whom."""

from collections.abc import Sequence
from html import escape

from partita import units
from partita.cluster import Cluster
from partita.jobs.explain_account import Links
from partita.jobs.traffic import HiddenShare, Sent
from partita.report.figures import matrix
from partita.report.html_parts import folded, table

MOST_DEVICES = 48  # one by one; of more, nodes are shown


def links_section(cluster: Cluster, everything: Sequence[Sent], hidden: HiddenShare) -> str:
    """A matrix of bytes, and what they are; nothing where nothing is sent."""
    if not everything:
        return ""
    used = sorted({device for one in everything for pair in one.traffic for device in pair})
    is_small = len(used) <= MOST_DEVICES
    place = {device: cluster.devices[device].name for device in used}
    if not is_small:
        place = {device: cluster.devices[device].node or place[device] for device in used}
    names = list(dict.fromkeys(place[device] for device in used))
    cells = {(a, b): 0.0 for a in names for b in names}
    for one in everything:
        for (source, target), size in one.traffic.items():
            cells[place[source], place[target]] += size
    values = [[cells[a, b] for b in names] for a in names]
    texts = [[f"{units.size(cells[a, b])} a step" for b in names] for a in names]
    total = sum(one.total_bytes for one in everything)
    links = Links(cluster)
    rows = [
        (
            one.purpose.words,
            units.size(one.total_bytes),
            f"{one.total_bytes / total:.0%}",
            _widest(links, one),
        )
        for one in everything
    ]
    what = "devices" if is_small else "nodes"
    node = {place[device]: cluster.devices[device].node for device in used}
    groups = [node[name] for name in names] if is_small else ()
    picture = matrix(f"bytes between {what} in a step", values, names, names, texts, groups)
    if len(set(groups)) > 1:
        picture += '<p class="soft">Thick lines lie between nodes.</p>'
    words = (
        f"{units.size(total)} are sent in a step, row to column; collectives are counted as rings. "
        f"{hidden.share:.0%} of the communication time is overlapped with computing."
    )
    header = ("purpose", "sent", "", "over")
    return (
        f'<h2>Communication</h2><p class="soft">{escape(words)}</p>'
        f"{table(header, rows, numbers=(1, 2))}"
        + folded(f"who sends to whom: {len(names):,} {what}", picture, is_open=len(names) <= 16)
    )


def _widest(links: Links, one: Sent) -> str:
    """The links that what is sent crosses, the most used first."""
    sizes: dict[str, float] = {}
    for pair, size in one.traffic.items():
        name = links.crossed((pair,))
        sizes[name] = sizes.get(name, 0.0) + size
    ranked = sorted(sizes, key=lambda name: (-sizes[name], name))
    total = one.total_bytes or 1.0
    return ", ".join(f"{name} {sizes[name] / total:.0%}" for name in ranked if name)
