"""What an engine tells of itself reaches the user once, however long the run is."""

import asyncio
from types import SimpleNamespace
from typing import Any

from proxima.engine.protocol import Health
from proxima.runtime.loop.publisher import EngineReports


def news(reports: EngineReports, **detail: Any) -> list[str]:
    return reports.health_warnings(Health(ok=True, version=0, detail=detail))


def test_each_event_is_reported_once() -> None:
    reports, events, reported = EngineReports("engine.log"), list[str](), list[str]()
    for number in range(37):
        events.append(f"event {number}")
        if number % 10 == 0:
            reported += news(reports, events=events)
    reported += news(reports, events=events)
    assert reported == events
    assert news(reports, events=events) == []


def test_a_lost_answer_points_to_a_log_that_is_there() -> None:
    (ours,) = news(EngineReports("engine.log"), replicas={"lost": 1}, log=None)
    assert ours.endswith("requested again; see engine.log")
    (theirs,) = news(EngineReports("engine.log"), replicas={"lost": 2}, log="the servers' own logs")
    assert theirs.startswith("2 server responses") and theirs.endswith("see the servers' own logs")


def test_counts_of_a_step_add_up_however_often_they_are_asked_for() -> None:
    reports = EngineReports("engine.log")
    for lost in (1, 3, 3, 4):
        news(reports, replicas={"lost": lost, "ready": 2})
    assert reports.metrics == {"replicas/lost": 4, "replicas/ready": 2}
    reports.metrics.clear()
    news(reports, replicas={"lost": 5, "ready": 1})
    assert reports.metrics == {"replicas/lost": 1, "replicas/ready": 1}


def test_an_older_answer_tells_nothing_again() -> None:
    reports = EngineReports("engine.log")
    assert news(reports, events=["a", "b"], exits=2) != []
    assert news(reports, events=["a"], exits=1) == []
    assert news(reports, events=["a", "b", "c"], exits=2) == ["c"]


def test_a_note_comes_with_the_first_sync_and_is_no_warning() -> None:
    reports, engine = EngineReports("engine.log"), SimpleNamespace()
    detail: dict[str, Any] = {"notes": ["new weights are sent by group"]}

    async def health() -> Health:
        return Health(ok=True, version=0, detail=detail)

    def published(version: int) -> dict[str, Any]:
        return asyncio.run(reports.published(engine, version))  # type: ignore[arg-type]

    engine.health = health
    assert published(0) == {}  # nothing was measured yet
    detail["sync"] = {"probe_mean": 0.1}
    assert [published(version)["notes"] for version in (1, 2)] == [["new weights are sent by group"], []]
    assert reports.health_warnings(asyncio.run(health())) == []
