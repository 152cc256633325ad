"""The line of a hand-over of weights, character by character."""

from proxima.view.log_lines import LogLines, sync_line

PROBED = {"version": 3, "sync/probe_mean": 0.000212, "sync/probe_max": 0.00314, "sync/seconds": 1.24}


def test_what_the_probe_found_beside_its_bounds():
    more = {"sync/bound_mean": 0.02, "sync/bound_max": 0.2, "sync/replicas": 2}
    expected = "weights of version 3 at 2 servers: probe mean 0.000212 max 0.00314 nats (bounds 0.02 and 0.2)"
    assert sync_line({**PROBED, **more}) == f"{expected}  1.2 s"
    prepared = {**PROBED, **more, "sync/prepare_seconds": 0.92}
    assert sync_line(prepared) == f"{expected}  1.2 s after 0.9 s to prepare"


def test_the_parts_of_its_time():
    parts = {"sync/prepare_seconds": 0.92, "sync/send_seconds": 0.81, "sync/probe_seconds": 0.0432}
    assert sync_line({**PROBED, **parts}).endswith("  1.2 s after 0.9 s to prepare  (send 0.8 s + probe 43 ms)")


def test_what_was_not_measured_is_left_out():
    assert sync_line(PROBED) == "weights of version 3 at 1 server: probe mean 0.000212 max 0.00314 nats  1.2 s"


def test_notes_come_before_it():
    lines = []
    LogLines(lines.append).synced({**PROBED, "notes": ["new weights are sent by group"]})
    note, line = (line.split("  ", 1)[1].strip() for line in lines)
    assert note == "new weights are sent by group" and line == sync_line(PROBED)
