import io

from proxima.runtime.placement.rank_lines import RankLines
from tests.manual_clock import ManualClock


def test_rank_0_at_once_and_equal_lines_of_the_others_as_one(tmp_path):
    clock, out, err, log = ManualClock(), io.StringIO(), io.StringIO(), tmp_path / "run" / "run.log"
    lines = RankLines(log, out=out, err=err, clock=clock.now)
    lines.add(0, 1, "step 1")
    lines.add(0, 2, "careful")
    assert out.getvalue() == "step 1\n" and err.getvalue() == "careful\n"
    for rank in (3, 1, 2, 6):
        lines.add(rank, 2, "slow")
        lines.add(rank, 2, "slow")
    lines.add(4, 1, "alone")
    lines.add(5, 1, "")
    lines.flush()
    assert "slow" not in err.getvalue() and not log.exists()  # another rank may say it too; there is no folder yet
    log.parent.mkdir()
    clock.advance(1)
    lines.flush()
    assert err.getvalue() == "careful\n[ranks 1-3, 6] slow (× 2)\n[rank 4] alone\n"
    lines.say("rank 3 died")
    assert err.getvalue().endswith("\nrank 3 died\n") and out.getvalue() == "step 1\n"
    written = log.read_text().splitlines()
    assert written[:3] == ["[rank 0] step 1", "[rank 0] careful", "[rank 3] slow"] and written[-1] == "rank 3 died"
    assert len(written) == 13 and lines.last == {0: "careful", 1: "slow", 2: "slow", 3: "slow", 6: "slow"}
