"""The journal: legal moves, whole transactions, and a kill in the middle of them."""

import errno
import json
import shutil
import sqlite3
import sys
from dataclasses import replace

import pytest

from proxima.data import UserError
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.runtime.resume.rewind import RestoredJournal
from proxima.runtime.state.journal import Journal
from tests.manual_clock import ManualClock
from tests.runtime.prompt_rows import consumed_prompts, prompt_row, prompt_rows


def prompts(*uids):
    return [Prompt(uid=uid, messages=({"role": "user", "content": f"{uid}?"},), tokens=(1, 2)) for uid in uids]


def group(uid, rewards=(1.0, 0.0), versions=((3, 3), (4,))):
    completions = tuple(
        replace(Completion.of_text(uid, i, "t", range(len(v))), policy_version=v) for i, v in enumerate(versions)
    )
    scores = tuple(Score.failed("timed out") if r is None else Score(value=r) for r in rewards)
    return Group(prompt=prompts(uid)[0], completions=completions, scores=scores)


def unconsumed(journal):
    return [record for record in prompt_rows(journal) if record.state != "consumed"]


def advance_to_scored(journal, *uids):
    journal.enqueue(prompts(*uids))
    journal.generating(uids)
    journal.scored([group(uid) for uid in uids])


@pytest.fixture
def clock():
    return ManualClock("2026-09-02T12:00:00+00:00")


@pytest.fixture
def journal(tmp_path, clock):
    with RestoredJournal(tmp_path / "run.sqlite", clock) as journal:
        yield journal


def test_a_step_from_admission_to_consumption(journal, clock):
    assert (journal.step, journal.version, last_cursor(journal)) == (0, 0, None)
    journal.enqueue(prompts(10, 11, 25), size=10)
    clock.advance(2)
    journal.generating([10, 11, 25])
    clock.advance(3)
    journal.scored([group(10), group(11, rewards=(None, 0.25)), group(25, rewards=(None, None))])
    journal.select(1, kept=[10, 11], dropped={25: "invalid"})
    clock.advance(1.5)
    journal.consume(1, {"position": 3}, {"reward/mean": 0.375, "loss": float("nan")}, version=1)

    assert (journal.step, journal.version, last_cursor(journal)) == (1, 1, {"position": 3})
    assert journal.counts() == {"consumed": 3}
    assert unconsumed(journal) == []
    assert [*journal.history()] == [{"reward/mean": 0.375, "loss": None}]
    ten, eleven, dropped = consumed_prompts(journal, 1)
    facts = ten.epoch, ten.policy_version, ten.completions, ten.invalid, ten.reward, ten.reason
    assert facts == (1, 3, 2, 0, 0.5, None)
    assert (eleven.reward, eleven.invalid) == (0.25, 1)
    assert (dropped.uid, dropped.epoch, dropped.reason, dropped.reward, dropped.invalid) == (25, 2, "invalid", None, 2)
    assert ten.admitted_at == "2026-09-02T12:00:00.000+00:00"
    assert ten.generating_at == "2026-09-02T12:00:02.000+00:00"
    assert ten.consumed_at == "2026-09-02T12:00:06.500+00:00"


def test_it_is_on_disk_and_in_wal_mode(tmp_path, journal):
    journal.enqueue(prompts(1))
    journal.set("steps", [1, 2])
    with Journal(tmp_path / "run.sqlite") as again:
        assert [e.uid for e in unconsumed(again)] == [1]
        assert again.get("steps") == [1, 2]
    raw = sqlite3.connect(tmp_path / "run.sqlite")
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # 2 is FULL


STATES = ["queued", "generating", "scored", "selected", "dropped", "consumed"]
MOVES = {
    "generating": lambda j: j.generating([1]),
    "queued": lambda j: j._move(1, "queued", "generating_at = NULL"),
    "scored": lambda j: j.scored([group(1)]),
    "selected": lambda j: j.select(j.step + 1, [1]),
    "dropped": lambda j: j.select(j.step + 1, [], {1: "uniform"}),
    "consumed by its step": lambda j: j.consume(j.step + 1, None, {}, version=j.step + 1),
    "consumed": lambda j: j._move(1, "consumed", "consumed_at = :now"),
}
WAY = {
    "queued": [],
    "generating": ["generating"],
    "scored": ["generating", "scored"],
    "selected": ["generating", "scored", "selected"],
    "dropped": ["generating", "scored", "dropped"],
    "consumed": ["generating", "scored", "selected", "consumed by its step"],
}
LEGAL = {
    ("queued", "generating"),
    ("generating", "scored"),
    ("generating", "dropped"),
    ("scored", "selected"),
    ("scored", "dropped"),
    ("selected", "consumed"),
    ("dropped", "consumed"),
}


@pytest.mark.parametrize("target", STATES)
@pytest.mark.parametrize("source", STATES)
def test_every_pair_of_states(journal, source, target):
    journal.enqueue(prompts(1))
    for state in WAY[source]:
        MOVES[state](journal)
    before = prompt_row(journal, 1)
    assert before.state == source
    if (source, target) in LEGAL:
        MOVES["consumed by its step" if target == "consumed" else target](journal)
        assert journal.state_of(1) == target
    else:
        with pytest.raises(ValueError, match="prompt 1 is "):
            MOVES[target](journal)
        assert prompt_row(journal, 1) == before


def test_the_rules_are_in_the_database(tmp_path, journal):
    """Not only this class keeps them: any writer of the file has to."""
    advance_to_scored(journal, 1)
    journal.select(1, [1])
    raw = sqlite3.connect(tmp_path / "run.sqlite")
    for statement in (
        "UPDATE prompts SET state = 'consumed'",  # without its step
        "UPDATE prompts SET state = 'queued', step = NULL",
        "INSERT INTO prompts (uid, epoch, state, admitted_after, admitted_at) VALUES (1, 0, 'queued', 0, '')",
        "INSERT INTO prompts (uid, epoch, state, admitted_after, admitted_at, step) VALUES (2, 0, 'consumed', 0, "
        "'', 1)",
        "INSERT INTO steps VALUES (2, 2, NULL, '{}', '')",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(statement)
    raw.close()
    journal.consume(1, None, {}, version=1)
    raw = sqlite3.connect(tmp_path / "run.sqlite")
    for statement in (
        "UPDATE prompts SET state = 'consumed'",
        "UPDATE prompts SET state = 'selected'",
        "UPDATE steps SET metrics = '{}'",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(statement)


def test_errors_name_the_prompt_and_its_state(journal):
    journal.enqueue(prompts(7))
    with pytest.raises(ValueError, match="prompt 7 was admitted before \\(queued\\); a uid is used once"):
        journal.enqueue(prompts(8, 7))
    assert journal.state_of(8) is None  # the whole admission was taken back
    with pytest.raises(ValueError, match="prompt 7 is queued, and can't become scored"):
        journal.scored([group(7)])
    with pytest.raises(ValueError, match="prompt 9 is not in the journal"):
        journal.generating([7, 9])
    assert prompt_row(journal, 7).attempts == 0


def test_consume_takes_what_was_selected_for_the_next_step(journal):
    advance_to_scored(journal, 1, 2, 3, 4)
    journal.select(1, [1, 2], {3: "uniform"})
    with pytest.raises(ValueError, match="the step to finish is 1"):
        journal.consume(2, None, {}, version=2)
    assert (journal.step, journal.counts()) == (0, {"dropped": 1, "scored": 1, "selected": 2})
    journal.consume(1, None, {}, version=1)
    assert (journal.step, journal.counts()) == (1, {"consumed": 3, "scored": 1})
    with pytest.raises(ValueError, match="step 1 is finished already"):
        journal.select(1, [])


def last_cursor(journal):
    row = journal._db.execute("SELECT cursor FROM steps ORDER BY step DESC LIMIT 1").fetchone()
    return row and json.loads(row[0])


def synchronous_steps(journal, last, batch=2):
    """What a synchronous loop writes: the cursor is the next uid."""
    while journal.step < last:
        step, first = journal.step + 1, last_cursor(journal) or 0
        uids = range(first, first + batch)
        advance_to_scored(journal, *uids)
        journal.select(step, uids[:1], {uids[1]: "uniform"})
        journal.consume(step, first + batch, {"step": step}, version=step)


def test_rewind_queues_again_what_the_cursor_has_passed(journal):
    """Asynchronous: prompts 2 and 3 were admitted before step 1 ended, 4 after it; step 2 consumed 2."""
    advance_to_scored(journal, 0, 1, 2)
    journal.enqueue(prompts(3))
    journal.select(1, [0, 1])
    journal.consume(1, 4, {}, version=1)
    journal.enqueue(prompts(4))
    journal.select(2, [2])
    journal.consume(2, 5, {}, version=2)
    journal.rewind(1)
    assert last_cursor(journal) == 4
    assert [(e.uid, e.state, e.attempts) for e in unconsumed(journal)] == [(2, "queued", 1), (3, "queued", 0)]
    assert journal.state_of(4) is None


def test_no_journal_at_all(tmp_path):
    (tmp_path / "run.sqlite").write_text("these are not the tables you are looking for, " * 50)
    with pytest.raises(ValueError, match="is damaged, or not a journal of proxima"):
        Journal(tmp_path / "run.sqlite")
    Journal(tmp_path / "damaged.sqlite").close()
    pages = (tmp_path / "damaged.sqlite").read_bytes()
    (tmp_path / "damaged.sqlite").write_bytes(pages[:8192] + b"\xff" * (len(pages) - 8192))
    with pytest.raises(
        UserError, match="is damaged, or not a journal .*; move it away, and a resume restores the steps"
    ):
        Journal(tmp_path / "damaged.sqlite")
    raw = sqlite3.connect(tmp_path / "other.sqlite")
    raw.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    raw.execute("INSERT INTO meta VALUES ('format', '99')")
    raw.commit()
    with pytest.raises(ValueError, match="format 99, this version reads 2"):
        Journal(tmp_path / "other.sqlite")


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_a_disk_that_refuses_is_not_blamed_on_the_file(tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(UserError) as refused:
            Journal(tmp_path / "run.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = "can't be read or written (disk I/O error); check the disk, then resume with --resume"
    assert str(refused.value) == f"{tmp_path}/run.sqlite {said}"


@pytest.mark.slow
def test_a_full_disk_changes_nothing(journal):
    synchronous_steps(journal, 2)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to say that the disk is full
    with pytest.raises(OSError, match="No space left on device: .*run.sqlite") as caught:
        journal.enqueue(prompts(*range(1000, 20_000)))
    assert caught.value.errno == errno.ENOSPC
    assert (journal.step, journal.counts(), last_cursor(journal)) == (2, {"consumed": 4}, 4)
    journal._db.execute("PRAGMA max_page_count = 1000000")
    synchronous_steps(journal, 3)
    assert journal.step == 3


def assert_sound(journal):
    assert journal._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    steps = journal._db.execute("SELECT step, cursor FROM steps").fetchall()
    assert [(step, int(cursor)) for step, cursor in steps] == [(i, 2 * i) for i in range(1, journal.step + 1)]
    for step, _ in steps:
        consumed = [(e.uid, e.reason) for e in consumed_prompts(journal, step)]
        assert consumed == [(2 * step - 2, None), (2 * step - 1, "uniform")]
    assert {e.uid for e in unconsumed(journal)} <= {2 * journal.step, 2 * journal.step + 1}


@pytest.mark.slow
def test_a_kill_before_any_statement(tmp_path, journal):
    """It leaves the files as they are then: a step is whole or nothing, and can be made again."""
    synchronous_steps(journal, 1)
    left = []

    def keep(statement):
        place = tmp_path / str(len(left))
        place.mkdir()
        for file in tmp_path.glob("run.sqlite*"):
            shutil.copy(file, place)
        left.append(place / "run.sqlite")

    journal._db.set_trace_callback(keep)
    synchronous_steps(journal, 2)
    journal._db.set_trace_callback(None)
    finished = []
    for path in left:
        with RestoredJournal(path) as again:
            assert_sound(again)
            finished.append(again.step)
            again.rewind(again.step)
            synchronous_steps(again, 3)
            assert_sound(again)
    # a step is nothing until its COMMIT, the last statement but one, in which the loop asks for the newest step
    assert finished == [1] * (len(left) - 1) + [2] and len(left) > 30


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path.name)])
def test_what_is_no_file_is_one_line(tmp_path, make):
    make(tmp_path / "run.sqlite")
    with pytest.raises(UserError, match="run.sqlite can't be read or written .unable to open .*; move it away, and a"):
        Journal(tmp_path / "run.sqlite")


@pytest.mark.parametrize("value", ["[", "[" * 2000, "9" * 5000])
def test_a_damaged_value_is_one_line(journal, value):
    journal.set("inputs", {})
    journal._db.execute("UPDATE meta SET value = ? WHERE key = 'inputs'", (value,))
    with pytest.raises(UserError, match="run.sqlite: inputs can't be read .*; move it away, and a resume restores"):
        journal.get("inputs")
