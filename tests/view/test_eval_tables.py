"""Progress, table and verdicts of an evaluation, character by character."""

import io

from proxima.evaluation.intervals import Interval
from proxima.evaluation.question_pairs import PairedComparison
from proxima.view.eval_tables import EvalProgress, comparison_table, results_table, verdict
from proxima.view.stage_progress import StageProgress
from tests.manual_clock import ManualClock
from tests.terminal import Terminal


def facts(**more):
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 512, "stop": []}
    estimates = {"accuracy": {"value": 0.125, "low": 0.0862, "high": 0.1779, "method": "wilson", "questions": 200}}
    base = {
        "questions": 200,
        "samples": 1,
        "answers": 200,
        "correct": 25,
        "known": 200,
        "invalid": 0,
        "estimates": estimates,
    }
    shares = {"reward": 0.125, "length": {"mean": 181.44}, "truncated": 0.025, "unanswered": 0.0, "tokens": 36288}
    return {**base, **shares, "sampling": sampling, "data": {"skipped": 0}, **more}


def result(**suites):
    model = {"name": "SmolLM2-135M-Instruct", "parameters": 134_515_008}
    return {
        "model": model,
        "seed": 1,
        "k": [],
        "engine": {"kind": "local", "dtype": "bfloat16"},
        "device": "cpu",
        "threads": 2,
        "suites": suites,
    }


def test_one_set():
    text = results_table(result(gsm8k=facts()), {"gsm8k": 62.0}, io.StringIO())
    assert text.splitlines() == [
        "SmolLM2-135M-Instruct  134.5 M  cpu 2 threads bfloat16  seed 1",
        "greedy, up to 512 tokens",
        "",
        "         n  greedy         95 %  length    cut  no answer  failed    time",
        "gsm8k  200   0.125  0.086–0.178   181.4  2.5 %      0.0 %       0  1m 02s",
    ]


def test_episodes_have_turns_and_calls():
    """A set with an environment beside one without."""
    played = {"episode/turns/mean": 2.46, "episode/calls": 1204.0, "episode/unreadable": 3.0}
    suites = {"sums": facts(episodes=played, truncated=0.0, invalid=2), "gsm8k": facts(truncated=0.06)}
    lines = results_table(result(**suites), {"sums": 62.0, "gsm8k": 62.0}, io.StringIO()).splitlines()
    assert lines[3:6] == [
        "         n  greedy         95 %  length  turns  calls    cut  no answer  failed    time",
        "sums   200   0.125  0.086–0.178   181.4    2.5  1,204  0.0 %      0.0 %       2  1m 02s",
        "gsm8k  200   0.125  0.086–0.178   181.4      –      –  6.0 %      0.0 %       0  1m 02s",
    ]
    assert "sums: 3 tool calls could not be read, and the model was shown the error" in lines
    assert "gsm8k: 6.0 % of the answers reached the limit of 512 tokens; raise --max-tokens" in lines
    often = results_table(result(sums=facts(episodes=played, truncated=0.5)), {}, io.StringIO())
    assert "50.0 % of the episodes reached a limit; raise --max-tokens, episode.turns or episode.tokens" in often
    limits = {"episode/cut/turns": 1.0, "episode/cut/tokens": 4.0, "episode/cut/context": 0.0}
    often = results_table(result(sums=facts(episodes=played | limits, truncated=0.5)), {}, io.StringIO())
    reached = "a limit (tokens 40.0 %, turns 10.0 %); raise --max-tokens or episode.tokens, episode.turns"
    assert f"50.0 % of the episodes reached {reached}" in often


def figures(**values):
    return {
        name.replace("_", "@"): {"value": v, "low": v - 0.1, "high": v + 0.1, "method": "bootstrap", "questions": 30}
        for name, v in values.items()
    }


def test_several_samples_and_what_to_mind():
    estimates = figures(mean_4=0.3, pass_2=0.4, pass_4=0.5, maj_2=0.3, maj_4=0.35)
    sampling = facts()["sampling"] | {"temperature": 0.7, "top_p": 0.95, "max_tokens": 8192}
    more = {"truncated": 0.4, "unanswered": 0.06, "invalid": 3, "data": {"skipped": 2}, "reward": 0.5}
    text = results_table(
        result(aime24=facts(samples=4, estimates=estimates, sampling=sampling, **more)), {}, io.StringIO()
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == "4 samples per question at temperature 0.7, top_p 0.95, up to 8,192 tokens"
    assert lines[3] == "n mean@4 95 % pass@4 maj@4 reward length cut no answer failed time"
    assert lines[4] == "aime24 200 0.300 0.200–0.400 0.500 0.350 0.500 181.4 40.0 % 6.0 % 3 –"
    assert lines[6:] == [
        "aime24: 40.0 % of the answers reached the limit of 8,192 tokens; raise --max-tokens",
        "aime24: 6.0 % of the texts contain no answer; they are wrong and don't vote",
        "aime24: 3 scores failed and are left out; see `error` in aime24.parquet",
        "aime24: 2 questions fill the context and were skipped",
    ]


def test_each_k_that_was_asked_for_has_a_column():
    """pass@1 and maj@1 are the mean."""
    estimates = figures(mean_4=0.3, pass_2=0.4, pass_4=0.5, maj_2=0.32, maj_4=0.35)
    sampling = facts()["sampling"] | {"temperature": 0.7}
    shown = result(aime24=facts(samples=4, estimates=estimates, sampling=sampling, reward=None)) | {"k": [1, 2, 4]}
    head, row = (line.split() for line in results_table(shown, {}, io.StringIO()).splitlines()[3:5])
    assert head[4:10] == ["pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert row[4:10] == ["0.300", "0.400", "0.500", "0.300", "0.320", "0.350"]


def test_nobody_knows():
    """The mean reward with its interval stands for the set; no column of dashes, no unknown accuracy."""
    reward = {"reward/mean": {"value": 0.7, "low": 0.6, "high": 0.8, "method": "bootstrap", "questions": 200}}
    mine = facts(estimates=reward, known=0, correct=0, reward=0.7, unanswered=None)
    lines = results_table(result(mine=mine), {"mine": 3.0}, io.StringIO()).splitlines()
    assert lines[-2].split() == ["n", "reward", "95", "%", "length", "cut", "failed", "time"]
    assert lines[-1].split()[:4] == ["mine", "200", "0.700", "0.600–0.800"]
    named = results_table(result(mine={**mine, "metric": "acc"}), {"mine": 3.0}, io.StringIO())
    assert "mine: accuracy unknown: no reward gives it" in named


def test_failed_scores_are_no_opinion():
    facts_of = {"estimates": {}, "known": 0, "correct": 0, "reward": None}
    text = results_table(result(mine=facts(**facts_of, answers=4, invalid=4)), {}, io.StringIO())
    assert "mine: accuracy unknown: 4 of 4 answers have no score" in text and "no reward gives it" not in text


def test_a_terminal_gets_colours_and_no_more_than_its_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = results_table(result(gsm8k=facts()), {"gsm8k": 62.0}, Terminal())
    assert "\x1b[1m" in text and "0.086–0.178" in text


def test_progress_on_a_terminal():
    clock, stream = ManualClock(), Terminal()
    view = EvalProgress(stream, clock)
    view.progress("load", 0, 1, "models")
    view.suite_started("gsm8k", 200, 200)
    clock.advance(20)
    view.progress("evaluate", 50, 200, "answers")
    view.progress("evaluate", 51, 200, "answers")  # sooner than a tenth of a second: not drawn
    last = stream.getvalue().rpartition("\r")[2]
    assert last == "gsm8k  50/200 answers   2.5/s   eta 1m 00s  " + "━" * 6 + "╌" * 18
    view.suite_finished("gsm8k", {}, 80.0)
    assert stream.getvalue().endswith("\r" + " " * len(last) + "\r")


def test_progress_elsewhere_is_a_line_a_minute():
    clock, stream = ManualClock(), io.StringIO()
    view = EvalProgress(stream, clock)
    view.suite_started("gsm8k", 200, 200)
    for done in range(1, 14):
        clock.advance(10)
        view.progress("evaluate", done, 20, "answers")
    view.warning("two\x1b[2J")
    view.suite_finished("gsm8k", {}, 1.0)
    assert stream.getvalue().splitlines() == [
        "gsm8k  6/20 answers   0.1/s   eta 2m 20s",
        "gsm8k  12/20 answers   0.1/s   eta 1m 20s",
        "WARNING two␛[2J",
    ]


def test_stages_where_there_is_no_terminal():
    """A stage that ends before its first line is due has none, and the time is taken from its first update."""
    clock, stream = ManualClock(), io.StringIO()
    progress = StageProgress(stream, clock, patience=10.0)
    progress.update("hash", 0, 2)
    clock.advance(9)
    progress.update("read", 0, 1000)
    clock.advance(20)
    progress.update("read", 500, 1000)
    progress.update("read", 501, 1000)
    clock.advance(10)
    progress.update("read", 900, None)
    assert stream.getvalue() == "read  500/1,000   25.0/s   eta 20 s\nread  900   30.0/s\n"


def test_each_of_several_sets_is_reported_when_it_is_done():
    stream = io.StringIO()
    view = EvalProgress(stream, ManualClock(), show_results=True)
    view.suite_finished("gsm8k", facts(), 62.0)
    view.suite_finished("mine", facts(estimates={}), 62.0)
    assert stream.getvalue() == "gsm8k  accuracy 0.125  0.086–0.178  1m 02s\nmine  accuracy unknown  1m 02s\n"


def side(value, low, high):
    return Interval(value=value, low=low, high=high, method="wilson", questions=200)


def compared(first, second, difference, won_lost_tied, **more):
    won, lost, tied = won_lost_tied
    facts = {"metric": "accuracy", "questions": won + lost + tied, "left_out": 0, "samples": (1, 1)}
    sides = {"first": first, "second": second, "difference": difference}
    return PairedComparison(**facts | sides | {"won": won, "lost": lost, "tied": tied} | more)


def test_comparison():
    few = side(0.05, 0.028, 0.09), side(0.075, 0.046, 0.12), side(0.025, -0.01, 0.06)
    many = side(0.5, 0.45, 0.55), side(0.45, 0.4, 0.5), side(-0.05, -0.08, -0.02)
    chance = compared(*few, (8, 3, 189), name="gsm8k", p=0.2266, test="McNemar, exact")
    sure = compared(*many, (40, 80, 380), name="math500", p=0.0004, test="sign flips", left_out=2, samples=(4, 4))
    text = comparison_table([chance, sure], ("evals/a", "evals/b"), io.StringIO())
    assert text.splitlines() == [
        "A  evals/a",
        "B  evals/b",
        "",
        "accuracy of each question",
        "",
        "           n              A [95 %]              B [95 %]   B − A       B − A 95 %  won  lost  tied        p",
        "gsm8k    200  0.050 [0.028, 0.090]  0.075 [0.046, 0.120]  +0.025  −0.010 … +0.060    8     3   189    0.227",
        "math500  500  0.500 [0.450, 0.550]  0.450 [0.400, 0.500]  −0.050  −0.080 … −0.020   40    80   380  < 0.001",
        "",
        "math500: 2 questions with an unknown result on one side are left out",
        "gsm8k: no significant difference on these 200 questions (B − A 95 % −0.010 … +0.060)",
        "math500: A is better by 0.050 (B − A 95 % −0.080 … −0.020; p < 0.001)",
        "p: McNemar, exact and sign flips, two-sided; the interval of the difference: bootstrap over the "
        "questions as pairs",
    ]


def test_equal_scores_are_said():
    same, zero = side(0.5, 0.4, 0.6), side(0.0, -0.01, 0.01)
    pair = compared(same, same, zero, (0, 0, 20), name="s", p=1.0, test="t")
    assert verdict(pair) == "s: no difference: accuracy is the same for each of the 20 questions"
