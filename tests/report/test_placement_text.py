"""A placement in words."""

from partita import units
from partita.engine import run
from partita.jobs.place import place
from partita.program import ProgramBuilder
from partita.report.placement import front_text, placement_text, shown_lanes


def test_all_devices_are_drawn_and_the_busiest_of_many_links():
    b = ProgramBuilder()
    devices = [b.lane(f"d{i}") for i in range(3)]
    links = [b.lane(f"l{i}", "link") for i in range(20)]
    b.add("work", devices[0], 100.0)
    for number, lane in enumerate(links):
        b.add(f"sent {number}", lane, 0.001 + number)
    shown = shown_lanes(run(b.build()))
    assert shown[:3] == devices
    assert shown[3:] == links[-8:]


def test_the_devices_rows_add_up_to_the_model():
    placed = place("alexnet", "malvik", method="heft", pinned=[("features.0", 1), ("loss", 2)])
    text = placement_text(placed)
    rows = [line.split() for line in text.split("\n") if line[:2] in ("0 ", "1 ", "2 ")]
    assert sum(int(row[3]) for row in rows) == len(placed.model.layers)
    assert sum(int(row[4]) for row in rows) == 23
    assert "»" in text  # something is sent
    assert "samples/s" in text


def test_a_step_has_its_interval_by_our_rules_and_none_by_exprimos():
    ours = place("alexnet", "malvik", method="heft")
    assert ours.best is not None
    assert ours.likely_step_s is not None
    low, high = ours.likely_step_s
    assert low < ours.best.step_s < high
    step = units.seconds(ours.best.step_s)
    between = f"{units.seconds(low)} to {units.seconds(high)}"
    assert f"{step}, predicted; 80 % interval {between}" in placement_text(ours)
    theirs = place("alexnet", "malvik", method="heft", semantics="exprimo")
    assert theirs.likely_step_s is None
    assert "predicted by Exprimo's rules" in placement_text(theirs)


def test_what_cannot_be_placed_is_said():
    text = placement_text(place("llama-7b", "1xGTX-1080-Ti", batch=1, method="heft"))
    assert text.split("\n")[-1].startswith("infeasible: ")


def test_the_front_is_a_table():
    placed = place("alexnet", "malvik", method="heft")
    lines = front_text(placed.front()).split("\n")
    assert lines[1].split() == ["step", "largest", "memory", "±6", "%", "devices", "placement"]
    assert len(lines) == 2 + len(placed.front())
