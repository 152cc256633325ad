"""An evaluation on the terminal: its progress, the table of its sets, and two results side by side."""

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
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, percent, printable, signed, write_safely
from proxima.view.log_lines import PATIENCE, why_unknown

INTERVAL = 0.1  # seconds between two drawings of the bar
WIDE = 200  # columns without a terminal
MUCH = 0.05  # share of truncated or unanswered texts that is reported
SIGNIFICANT = 0.05  # p below which a difference is reported


class EvalProgress(NullObserver):
    """Progress of an evaluation: a bar with rate and time left on a terminal, elsewhere a line per minute.

    Args:
        stream: standard error, so that standard output has only the table.
        show_results: also print the result of each set when it is done, for several sets, which may take hours.
    """

    def __init__(self, stream: TextIO, clock: Clock | None = None, *, show_results: bool = False) -> None:
        self._stream, self._clock, self._show_results = stream, clock or SystemClock(), show_results
        self._live = stream.isatty()
        self._name, self._start, self._last_output, self._width = "", 0.0, self._clock.now(), 0

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if stage == "load":
            self._show("loading the model", force=True)
            return
        spent = self._clock.now() - self._start
        rate = done / spent if spent > 0 else 0.0
        left = f"   eta {duration((total - done) / rate)}" if rate and done < total else ""
        self._show(
            f"{self._name}  {count(done)}/{count(total)} {unit}   {rate:.1f}/s{left}",
            share=done / total if total else 1.0,
        )

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        self._name, self._start = name, self._clock.now()
        self._show(f"{name}  0/{count(answers)} answers", share=0.0, force=True)

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        self.close()
        if self._show_results:
            main = main_figure(facts)
            accuracy = f"{fixed(main['value'], 3)}  {_bounds(main)}" if main else "accuracy unknown"
            self._write(f"{name}  {accuracy}  {duration(seconds)}\n")

    def close(self) -> None:
        """Erase the bar; also after Ctrl-C."""
        self._wipe()

    def warning(self, text: str) -> None:
        self._wipe()
        self._write(f"WARNING {printable(text)}\n")

    def _show(self, text: str, share: float | None = None, force: bool = False) -> None:
        now = self._clock.now()
        if not self._live:
            if now - self._last_output >= PATIENCE:
                self._last_output = now
                self._write(text + "\n")
            return
        if force or now - self._last_output >= INTERVAL:
            self._last_output = now
            bar = "" if share is None else "  " + "━" * round(24 * share) + "╌" * (24 - round(24 * share))
            self._wipe()
            self._width = len(text) + len(bar)
            self._write(text + bar)

    def _wipe(self) -> None:
        if self._live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        write_safely(self._stream, text)


def results_table(result: Mapping[str, Any], seconds: Mapping[str, float], stream: TextIO) -> str:
    """Model and settings, a row per set, and the caveats."""
    model, suites = result["model"], result["suites"]
    head = (
        f"{printable(str(model['name']))}  {magnitude(model['parameters'])}  {_engine(result)}  seed {result['seed']}"
    )
    settings = dict.fromkeys(_sampling(facts) for facts in suites.values())
    table = _rendered(_table(suites, seconds, result.get("k") or ()), stream)
    return "\n".join([head, *settings, "", table, *(["", *remarks] if (remarks := caveats(suites)) else [])])


def _engine(result: Mapping[str, Any]) -> str:
    engine = result["engine"]
    threads = result["threads"]
    return f"{result['device']} {threads} thread{'s' * (threads != 1)} {engine.get('dtype', engine['kind'])}"


def _sampling(facts: Mapping[str, Any]) -> str:
    sampling = facts["sampling"]
    if sampling["temperature"] == 0:
        how = "greedy"
    else:
        neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
        cuts = [f"{name} {sampling[name]:g}" for name, value in neutral.items() if sampling[name] != value]
        how = f"{facts['samples']} samples per question at temperature {sampling['temperature']:g}"
        how = ", ".join([how, *cuts])
    return f"{how}, up to {count(sampling['max_tokens'])} tokens"


def _table(suites: Mapping[str, Any], seconds: Mapping[str, float], ks: Sequence[int]) -> Table:
    """A row per set, and a column for each k that the user gave, otherwise for the largest; pass@1 and maj@1 are the
    mean."""
    samples = max(facts["samples"] for facts in suites.values())
    first = "greedy" if samples == 1 else f"mean@{samples}"
    if samples == 1 and any(facts["sampling"]["temperature"] > 0 for facts in suites.values()):
        first = "accuracy"
    shown = sorted(set(ks)) or [samples] * (samples > 1)
    voting = any(name.startswith("maj@") for facts in suites.values() for name in facts["estimates"])
    more = [f"pass@{k}" for k in shown] + ([f"maj@{k}" for k in shown] if voting else [])
    rewarded = any(_reward_differs(facts) for facts in suites.values())
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("")
    last = ["length", "cut", "no answer", "failed", "time"]
    for name in ["n", first, "95 %", *more, *(["reward"] if rewarded else []), *last]:
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
    """The accuracy of a set, with several samples their mean; None if it is unknown."""
    estimates: Mapping[str, Any] = facts["estimates"]
    return estimates.get("accuracy") or estimates.get(f"mean@{facts['samples']}")


def _reward_differs(facts: Mapping[str, Any]) -> bool:
    """True if the mean reward is not the share of right answers."""
    share = facts["correct"] / facts["known"] if facts["known"] else None
    return facts["reward"] is not None and (share is None or abs(facts["reward"] - share) > 1e-9)


def _bounds(figure: Mapping[str, Any] | None) -> str:
    return f"{fixed(figure['low'], 3)}–{fixed(figure['high'], 3)}" if figure else NONE


def caveats(suites: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know, and what to do about it."""
    texts = []
    for name, facts in suites.items():
        if not facts["known"] and facts["answers"]:
            texts.append(f"{name}: accuracy unknown: {why_unknown(facts['answers'], facts['invalid'])}")
        if (facts["truncated"] or 0) >= MUCH:
            where = f"reached the limit of {count(facts['sampling']['max_tokens'])} tokens"
            texts.append(f"{name}: {percent(facts['truncated'])} of the answers {where}; raise --max-tokens")
        if (facts["unanswered"] or 0) >= MUCH:
            texts.append(f"{name}: {percent(facts['unanswered'])} of the texts contain no answer: wrong, and no vote")
        if facts["invalid"]:
            texts.append(f"{name}: {facts['invalid']} scores failed and are left out; see `error` in {name}.parquet")
        if facts["data"]["skipped"]:
            texts.append(f"{name}: {facts['data']['skipped']} questions fill the context and were skipped")
    return texts


def comparison_table(pairs: Sequence[PairedComparison], names: tuple[str, str], stream: TextIO) -> str:
    """The second result compared with the first: a row per set, and the verdicts."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("")
    for name in ("n", "A", "B", "B − A", "95 %", "won", "lost", "tied", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        style = "" if pair.p >= SIGNIFICANT else "bold"
        table.add_row(
            pair.name,
            count(pair.questions),
            _side(pair.first),
            _side(pair.second),
            Text(signed(pair.difference.value), style=style),
            f"{signed(pair.difference.low)} … {signed(pair.difference.high)}",
            count(pair.won),
            count(pair.lost),
            count(pair.tied),
            p_value(pair.p),
        )
    lines = [f"A  {names[0]}", f"B  {names[1]}", "", _rendered(table, stream), ""]
    for pair in pairs:
        if pair.left_out:
            lines.append(f"{pair.name}: {pair.left_out} questions with an unknown result on one side are left out")
    tests = dict.fromkeys(pair.test for pair in pairs)
    score, resampled = "Tango's paired score interval", "bootstrap over the questions as pairs"
    intervals = dict.fromkeys(score if pair.difference.method == "score" else resampled for pair in pairs)
    how = f"p: {' and '.join(tests)}, two-sided; the interval of the difference: {' and '.join(intervals)}"
    return "\n".join([*lines, *(verdict(pair) for pair in pairs), how])


def verdict(pair: PairedComparison) -> str:
    """`gsm8k: B is better by 0.045 (p = 0.012)`, or that no difference is significant."""
    if pair.p >= SIGNIFICANT:
        half = fixed(pair.difference.half, 3)
        return f"{pair.name}: no significant difference on these {count(pair.questions)} questions (± {half})"
    side = "B" if pair.difference.value > 0 else "A"
    return f"{pair.name}: {side} is better by {fixed(abs(pair.difference.value), 3)} ({_with_p(pair.p)})"


def _with_p(p: float) -> str:
    return f"p {p_value(p)}" if p < 0.001 else f"p = {p_value(p)}"


def p_value(p: float) -> str:
    """`0.012`, `< 0.001`."""
    return "< 0.001" if p < 0.001 else fixed(p, 3)


def _side(interval: Interval) -> str:
    return f"{fixed(interval.value, 3)} [{fixed(interval.low, 3)}, {fixed(interval.high, 3)}]"


def _rendered(table: Table, stream: TextIO) -> str:
    """The table as text, with colours where the stream is a terminal, as wide as it needs to be where it is npair."""
    terminal = stream.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=None if terminal else WIDE)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())
