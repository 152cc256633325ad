"""An evaluation as a person sees it: progress while it runs, a table of the sets, and two results side by side."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxima.evaluate.intervals import Interval
from proxima.evaluate.question_pairs import PairedComparison
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.observer import NullObserver, Stage
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, percent, printable, signed
from proxima.view.log_lines import PATIENCE

INTERVAL = 0.1  # seconds between two drawings of the bar
WIDE = 200  # columns where there is no terminal to say
MUCH = 0.05  # share of cut or unanswered answers that wants a remark
SURE = 0.05  # p below which a difference is called one


class EvalProgress(NullObserver):
    """Progress of an evaluation: a bar with rate and time left on a terminal, elsewhere a line a minute.

    Args:
        stream: where to; standard error leaves standard output to the table.
        clock: measures the rate.
        tell: also say what came of each set as soon as it is done; for several, which may take hours.
    """

    def __init__(self, stream: TextIO, clock: Clock | None = None, *, tell: bool = False) -> None:
        self._stream, self._clock, self._tell = stream, clock or SystemClock(), tell
        self._live = stream.isatty()
        self._name, self._began, self._told, self._width = "", 0.0, self._clock.now(), 0

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if stage == "load":
            self._show("loading the model", force=True)
            return
        spent = self._clock.now() - self._began
        rate = done / spent if spent > 0 else 0.0
        left = f"   eta {duration((total - done) / rate)}" if rate and done < total else ""
        self._show(
            f"{self._name}  {count(done)}/{count(total)} {unit}   {rate:.1f}/s{left}",
            share=done / total if total else 1.0,
        )

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        self._name, self._began = name, self._clock.now()
        self._show(f"{name}  0/{count(answers)} answers", share=0.0, force=True)

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        self.close()
        if self._tell:
            main = main_figure(facts)
            said = f"{fixed(main['value'], 3)}  {_bounds(main)}" if main else "accuracy unknown"
            self._write(f"{name}  {said}  {duration(seconds)}\n")

    def close(self) -> None:
        """Leave the terminal as it was; also after Ctrl-C."""
        self._wipe()

    def warning(self, text: str) -> None:
        self._wipe()
        self._write(f"WARNING {printable(text)}\n")

    def _show(self, text: str, share: float | None = None, force: bool = False) -> None:
        now = self._clock.now()
        if not self._live:
            if now - self._told >= PATIENCE:
                self._told = now
                self._write(text + "\n")
            return
        if force or now - self._told >= INTERVAL:
            self._told = now
            bar = "" if share is None else "  " + "━" * round(24 * share) + "╌" * (24 - round(24 * share))
            self._wipe()
            self._width = len(text) + len(bar)
            self._write(text + bar)

    def _wipe(self) -> None:
        if self._live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def results_table(result: Mapping[str, Any], seconds: Mapping[str, float], stream: TextIO) -> str:
    """Model and settings, a line a set, and what a person should know of the numbers."""
    model, suites = result["model"], result["suites"]
    head = "  ".join(
        part
        for part in (
            printable(str(model["name"])),
            magnitude(model["parameters"]),
            _engine(result),
            f"seed {result['seed']}",
        )
        if part
    )
    drawn = dict.fromkeys(_sampling(facts) for facts in suites.values())
    table = _rendered(_table(suites, seconds, result.get("k") or ()), stream)
    return "\n".join([head, *drawn, "", table, *(["", *remarks] if (remarks := remarks_on(suites)) else [])])


def _engine(result: Mapping[str, Any]) -> str:
    engine = result["engine"]
    threads = result["threads"]
    return f"{result['device']} {threads} thread{'s' * (threads != 1)} {engine.get('dtype', engine['kind'])}"


def _sampling(facts: Mapping[str, Any]) -> str:
    sampling = facts["sampling"]
    if sampling["temperature"] == 0:
        how = "greedy"
    else:
        cuts = [
            f"{name} {sampling[name]:g}"
            for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
            if sampling[name] != off
        ]
        how = ", ".join([f"{facts['samples']} samples a question at temperature {sampling['temperature']:g}", *cuts])
    return f"{how}, up to {count(sampling['max_tokens'])} tokens"


def _table(suites: Mapping[str, Any], seconds: Mapping[str, float], ks: Sequence[int]) -> Table:
    """One line a set. Of several k, the largest has a column, unless the user asked: then each has; pass@1 and maj@1
    are the mean."""
    samples = max(facts["samples"] for facts in suites.values())
    first = "greedy" if samples == 1 else f"mean@{samples}"
    if samples == 1 and any(facts["sampling"]["temperature"] > 0 for facts in suites.values()):
        first = "accuracy"
    shown = sorted(set(ks)) or [samples] * (samples > 1)
    voting = any(name.startswith("maj@") for facts in suites.values() for name in facts["estimates"])
    more = [f"pass@{k}" for k in shown] + ([f"maj@{k}" for k in shown] if voting else [])
    rewarded = any(_reward_says_more(facts) for facts in suites.values())
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("")
    columns = [
        "n",
        first,
        "95 %",
        *more,
        *(["reward"] if rewarded else []),
        "length",
        "cut",
        "no answer",
        "failed",
        "time",
    ]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, facts in suites.items():
        estimates, main = facts["estimates"], main_figure(facts)
        length = (facts["length"] or {}).get("mean")
        table.add_row(
            name,
            count(facts["questions"]),
            Text(fixed(main["value"], 3) if main else NONE, style="bold"),
            _bounds(main),
            *(
                fixed((estimates.get(key) or (main if key.endswith("@1") else None) or {}).get("value"), 3)
                for key in more
            ),
            *([fixed(facts["reward"], 3)] if rewarded else []),
            fixed(length, 1),
            percent(facts["truncated"]),
            percent(facts["unanswered"]),
            count(facts["invalid"]),
            duration(seconds.get(name)),
        )
    return table


def main_figure(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The accuracy of a set: of one answer, or the mean over several; None where no reward knows."""
    estimates: Mapping[str, Any] = facts["estimates"]
    return estimates.get("accuracy") or estimates.get(f"mean@{facts['samples']}")


def _reward_says_more(facts: Mapping[str, Any]) -> bool:
    """The mean reward is not the share of right answers."""
    share = facts["correct"] / facts["known"] if facts["known"] else None
    return facts["reward"] is not None and (share is None or abs(facts["reward"] - share) > 1e-9)


def _bounds(figure: Mapping[str, Any] | None) -> str:
    return f"{fixed(figure['low'], 3)}–{fixed(figure['high'], 3)}" if figure else NONE


def remarks_on(suites: Mapping[str, Any]) -> list[str]:
    """What would make a reader misread the table, and what to do."""
    found = []
    for name, facts in suites.items():
        if not facts["known"] and facts["answers"]:
            found.append(f"{name}: accuracy unknown: {_why_unknown(facts)}")
        if (facts["truncated"] or 0) >= MUCH:
            limit = count(facts["sampling"]["max_tokens"])
            found.append(
                f"{name}: {percent(facts['truncated'])} of the answers were cut off at {limit} tokens; raise "
                "--max-tokens"
            )
        if (facts["unanswered"] or 0) >= MUCH:
            found.append(
                f"{name}: in {percent(facts['unanswered'])} of the texts no answer was found: wrong, and no vote"
            )
        if facts["invalid"]:
            found.append(f"{name}: {facts['invalid']} scores failed: in no figure; see `error` in {name}.parquet")
        if facts["data"]["skipped"]:
            found.append(
                f"{name}: {facts['data']['skipped']} questions leave no room for an answer in the context and were "
                "not asked"
            )
    return found


def _why_unknown(facts: Mapping[str, Any]) -> str:
    """No score is no opinion: only where some scores are valid, it is the reward that does not say."""
    if not facts["invalid"]:
        return "no reward says what is right"
    rest = "" if facts["invalid"] == facts["answers"] else "; of the others no reward says whether they are right"
    return f"{count(facts['invalid'])} of {count(facts['answers'])} answers have no score{rest}"


def comparison_table(found: Sequence[PairedComparison], names: tuple[str, str], stream: TextIO) -> str:
    """The second result against the first, a line a set, and in words what it means."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("")
    for name in ("n", "A", "B", "B − A", "95 %", "won", "lost", "tied", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        style = "" if one.p >= SURE else "bold"
        table.add_row(
            one.name,
            count(one.questions),
            _side(one.first),
            _side(one.second),
            Text(signed(one.difference.value), style=style),
            f"{signed(one.difference.low)} … {signed(one.difference.high)}",
            count(one.won),
            count(one.lost),
            count(one.tied),
            p_value(one.p),
        )
    lines = [f"A  {names[0]}", f"B  {names[1]}", "", _rendered(table, stream), ""]
    for one in found:
        if one.left_out:
            lines.append(f"{one.name}: {one.left_out} questions without a known answer on one side are left out")
    tests = dict.fromkeys(one.test for one in found)
    score, resampled = "Tango's paired score interval", "bootstrap over the questions, each with both results"
    intervals = dict.fromkeys(score if one.difference.method == "score" else resampled for one in found)
    how = f"p: {' and '.join(tests)}, two-sided; the interval of the difference: {' and '.join(intervals)}"
    return "\n".join([*lines, *(verdict(one) for one in found), how])


def verdict(one: PairedComparison) -> str:
    """`gsm8k: B is better by 0.045 (p = 0.012)`, or that it can't be told."""
    if one.p >= SURE:
        half = one.difference.half
        return (
            f"{one.name}: no difference that these {count(one.questions)} questions could tell from chance (± "
            f"{fixed(half, 3)})"
        )
    side = "B" if one.difference.value > 0 else "A"
    return f"{one.name}: {side} is better by {fixed(abs(one.difference.value), 3)} ({_with_p(one.p)})"


def _with_p(p: float) -> str:
    return f"p {p_value(p)}" if p < 0.001 else f"p = {p_value(p)}"


def p_value(p: float) -> str:
    """`0.012`, `< 0.001`."""
    return "< 0.001" if p < 0.001 else fixed(p, 3)


def _side(interval: Interval) -> str:
    return f"{fixed(interval.value, 3)} [{fixed(interval.low, 3)}, {fixed(interval.high, 3)}]"


def _rendered(table: Table, stream: TextIO) -> str:
    """The table as text, with colours where the stream is a terminal, as wide as it needs to be where it is none."""
    terminal = stream.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=None if terminal else WIDE)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())
