"""An evaluation on the terminal: its progress, the table of its sets, and two results side by side."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TextIO

from rich.text import Text

from proxima.config.outcomes import Outcome, outcome_lines
from proxima.data import UserError
from proxima.data.errors import counted, suggestion
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.json_reader import load_json
from proxima.data.outcomes import METRIC_ALIASES
from proxima.evaluation.eval_run import EvalObserver, EvalOutcome
from proxima.evaluation.headline import ACCURACY, Headline
from proxima.evaluation.intervals import Interval
from proxima.evaluation.question_pairs import (
    ChangedQuestions,
    PairedComparison,
    changed_questions,
    compare_results,
    metrics_of,
)
from proxima.evaluation.results import QuestionResult, read_result
from proxima.rollout.episodes.figures import OTHER_FORMAT
from proxima.runtime.watch.clock import Clock
from proxima.view.episode_lines import limits_reached
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, percent, printable, signed
from proxima.view.log_lines import why_unknown
from proxima.view.stage_progress import StageProgress
from proxima.view.terminal import Format, table_as, table_text

LINE = 300  # characters of a question, and of an answer, on a line
MUCH = 0.05  # minimum share of truncated or unanswered texts that is reported
SIGNIFICANT = 0.05  # p below which a difference is reported
PAIR_FIGURES = {
    "accuracy": "accuracy",
    "length_only/accuracy": "length alone",
    "random/accuracy": "a coin",
    "over_length/accuracy": "accuracy over length alone",
    "calibration/error": "calibration error",
}
BIN = "calibration/"


class EvalProgress(EvalObserver):
    """Progress of an evaluation on standard error, so that standard output has only the table. `show_results` prints
    the result of each set as soon as it is done, for evaluations of several sets, which may take hours."""

    def __init__(self, stream: TextIO, clock: Clock | None = None, *, show_results: bool = False) -> None:
        self._line = StageProgress(stream, clock)
        self._show_results = show_results
        self._name = ""
        self._live = stream.isatty()

    def progress(self, stage: Literal["load", "evaluate"], done: int, total: int, unit: str) -> None:
        if stage != "load":
            self._line.update(self._name, done, total, unit)
        elif self._live:
            self._line.show("loading the model")

    def chosen(self, outcomes: Sequence[Outcome]) -> None:
        """Say what the settings that are left to the machine have become."""
        for line in outcome_lines(outcomes):
            self._line.write(f"auto  {printable(line)}")

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        self._name = name
        self._line.begin(name)
        if self._live:
            self._line.show(f"{name}  0/{count(answers)} answers", 0.0)

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        self.close()
        if self._show_results:
            metric, main = main_figure(facts)
            figure = f"{_value(main)}  {_bounds(main)}" if main else "unknown"
            self._line.write(f"{name}  {metric} {figure}  {duration(seconds)}")

    def close(self) -> None:
        """Erase the progress bar; also called after Ctrl-C."""
        self._line.clear()

    def warning(self, text: str) -> None:
        self._line.write(f"WARNING {printable(text)}")


def results_table(result: Mapping[str, Any], seconds: Mapping[str, float], stream: TextIO) -> str:
    """Format the model and settings, a row per set, and the caveats."""
    model = result["model"]
    suites = result["suites"]
    dtype = result["engine"].get("dtype", result["engine"]["kind"])
    where = f"{result['device']} {counted(result['threads'], 'thread')} {dtype}"
    head = f"{printable(str(model['name']))}  {magnitude(model['parameters'])}  {where}  seed {result['seed']}"
    settings = dict.fromkeys(_sampling(facts) for facts in suites.values())
    table = table_text(_rows(suites, seconds, result.get("k") or ()), stream)
    lines = [head, *settings, "", table]
    remarks = caveats(suites)
    if remarks:
        lines += ["", *remarks]
    return "\n".join(lines)


def results_rows(result: Mapping[str, Any], seconds: Mapping[str, float]) -> list[dict[str, str | Text]]:
    """Build the rows of the table."""
    return _rows(result["suites"], seconds, result.get("k") or ())


def result_numbers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the unrounded numbers of each set: every estimate with its interval."""
    rows = []
    for name, facts in result["suites"].items():
        row: dict[str, Any] = {"set": name, "questions": facts["questions"], "samples": facts["samples"]}
        for key, figure in facts["estimates"].items():
            row |= {key: figure["value"], f"{key}/low": figure["low"], f"{key}/high": figure["high"]}
        row |= {"truncated": facts["truncated"], "failed": facts["invalid"]}
        rows.append(row)
    return rows


def _sampling(facts: Mapping[str, Any]) -> str:
    sampling = facts["sampling"]
    limit = f"up to {count(sampling['max_tokens'])} tokens"
    if sampling["temperature"] == 0:
        return f"greedy, {limit}"
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    cuts = [f"{name} {sampling[name]:g}" for name, value in neutral.items() if sampling[name] != value]
    how = f"{facts['samples']} samples per question at temperature {sampling['temperature']:g}"
    return ", ".join([how, *cuts, limit])


def _rows(suites: Mapping[str, Any], seconds: Mapping[str, float], ks: Sequence[int]) -> list[dict[str, str | Text]]:
    """Build a row per set, with a column for each k that the user gave, otherwise for the largest; pass@1 and maj@1 are
    the mean."""
    samples = max(facts["samples"] for facts in suites.values())
    first = _name_of_figures(suites)
    shown = sorted(set(ks))
    if not shown and samples > 1:
        shown = [samples]
    keys = [f"pass@{k}" for k in shown]
    if any(map(_votes, suites.values())):
        keys += [f"maj@{k}" for k in shown]
    rewarded = first != "reward" and any(_reward_differs(facts) for facts in suites.values())
    answered = any(facts["unanswered"] is not None for facts in suites.values())
    played = any(facts.get("episodes") for facts in suites.values())
    rows = []
    for name, facts in suites.items():
        _, main = main_figure(facts)
        row: dict[str, str | Text] = {
            "": name,
            "n": count(facts["questions"]),
            first: Text(_value(main), style="bold"),
            "95 %": _bounds(main),
        }
        for key in keys:
            otherwise = main if key.endswith("@1") else None
            row[key] = _value(facts["estimates"].get(key) or otherwise)
        if rewarded:
            row["reward"] = fixed(facts["reward"], 3)
        row["length"] = fixed((facts["length"] or {}).get("mean"), 1)
        if played:
            row |= _turns(facts.get("episodes") or {})
        row["cut"] = percent(facts["truncated"])
        if answered:
            row["no answer"] = percent(facts["unanswered"])
        row["failed"] = count(facts["invalid"])
        row["time"] = duration(seconds.get(name))
        rows.append(row)
    return rows


def _name_of_figures(suites: Mapping[str, Any]) -> str:
    """The title of the column with the main figure of each set."""
    names = {main_figure(facts)[0] for facts in suites.values()}
    if names == {"accuracy"} and all(facts["sampling"]["temperature"] == 0 for facts in suites.values()):
        return "greedy"
    return names.pop() if len(names) == 1 else "figure"


def _votes(facts: Mapping[str, Any]) -> bool:
    return any(name.startswith("maj@") for name in facts["estimates"])


def _turns(episodes: Mapping[str, float]) -> dict[str, str]:
    """Format the mean number of turns, and the tool calls of all episodes."""
    return {"turns": fixed(episodes.get("episode/turns/mean"), 1), "calls": count(episodes.get("episode/calls"))}


def _value(figure: Mapping[str, Any] | None) -> str:
    return fixed(figure["value"], 3) if figure else NONE


def main_figure(facts: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the main figure of a set and its name: the named metric; else the accuracy, with several samples their
    mean, `mean@8`; else, if no reward decides correctness, the mean reward. None if it is unknown."""
    accuracy = "accuracy" if facts["samples"] == 1 else f"mean@{facts['samples']}"
    values = {key: figure["value"] for key, figure in facts["estimates"].items()}
    headline = Headline.of([{**values, ACCURACY: values.get(accuracy)}], facts.get("metric"))
    key = accuracy if headline.key == ACCURACY else headline.key
    return Headline(key).name, facts["estimates"].get(key)


def _reward_differs(facts: Mapping[str, Any]) -> bool:
    """Return True if the mean reward is not the share of correct answers."""
    if facts["reward"] is None:
        return False
    if not facts["known"]:
        return True
    share = float(facts["correct"] / facts["known"])
    return abs(float(facts["reward"]) - share) > 1e-9


def _bounds(figure: Mapping[str, Any] | None) -> str:
    if figure:
        return f"{fixed(figure['low'], 3)}–{fixed(figure['high'], 3)}"
    return NONE


def caveats(suites: Mapping[str, Any]) -> list[str]:
    """Return the caveats of the table, with remedies."""
    texts = []
    for name, facts in suites.items():
        metric, main = main_figure(facts)
        if main is None and facts["answers"]:
            texts.append(f"{name}: {metric} unknown: {why_unknown(facts)}")
        if (facts["truncated"] or 0) >= MUCH:
            what = "answers"
            where = f"the limit of {count(facts['sampling']['max_tokens'])} tokens; raise --max-tokens"
            if facts.get("episodes"):
                what = "episodes"
                where = limits_reached(facts["truncated"], facts["episodes"], "--max-tokens")
            texts.append(f"{name}: {percent(facts['truncated'])} of the {what} reached {where}")
        if (facts["unanswered"] or 0) >= MUCH:
            texts.append(
                f"{name}: {percent(facts['unanswered'])} of the texts contain no answer; they are wrong and don't vote"
            )
        if facts["invalid"]:
            texts.append(f"{name}: {facts['invalid']} scores failed and are left out; see `error` in {name}.parquet")
        unreadable = (facts.get("episodes") or {}).get("episode/unreadable")
        if unreadable:
            texts.append(f"{name}: {count(unreadable)} tool calls could not be read, and the model was shown the error")
            for key in facts["episodes"]:
                written = key.removeprefix(OTHER_FORMAT)
                if written != key:
                    texts.append(f"{name}: calls were written as {written}; episode.tool_format={written} reads them")
        if facts["data"]["skipped"]:
            texts.append(f"{name}: {facts['data']['skipped']} questions fill the context and were skipped")
    return texts


def comparison_rows(pairs: Sequence[PairedComparison]) -> list[dict[str, str | Text]]:
    """Compare the second result with the first: a row per set."""
    rows = []
    for pair in pairs:
        style = "bold" if pair.p < SIGNIFICANT else ""
        row: dict[str, str | Text] = {
            "": pair.name,
            "n": count(pair.questions),
            "A [95 %]": _side(pair.first),
            "B [95 %]": _side(pair.second),
            "B − A": Text(signed(pair.difference.value), style=style),
            "B − A 95 %": _difference(pair),
            "won": count(pair.won),
            "lost": count(pair.lost),
            "tied": count(pair.tied),
            "p": p_value(pair.p),
        }
        rows.append(row)
    return rows


def comparison_table(pairs: Sequence[PairedComparison], names: tuple[str, str], stream: TextIO) -> str:
    """Format the rows and the verdicts."""
    metrics = " and ".join(dict.fromkeys(pair.metric for pair in pairs))
    head = [f"A  {names[0]}", f"B  {names[1]}", "", f"{metrics} of each question"]
    lines = [*head, "", table_text(comparison_rows(pairs), stream), ""]
    for pair in pairs:
        if pair.left_out:
            lines.append(f"{pair.name}: {pair.left_out} questions with an unknown result on one side are left out")
    tests = dict.fromkeys(pair.test for pair in pairs)
    intervals = dict.fromkeys(_interval_of(pair) for pair in pairs)
    how = f"p: {' and '.join(tests)}, two-sided; the interval of the difference: {' and '.join(intervals)}"
    return "\n".join([*lines, *(verdict(pair) for pair in pairs), how])


def _interval_of(pair: PairedComparison) -> str:
    """How the interval of the difference was computed."""
    if pair.difference.method == "score":
        return "Tango's paired score interval"
    return "bootstrap over the questions as pairs"


def changed_lines(changed: ChangedQuestions, most: int) -> list[str]:
    """Name the questions that B lost, and those that it gained, with both answers; up to `most` of each."""
    lines = []
    for title, pairs in (("lost", changed.lost), ("gained", changed.gained)):
        head = f"{changed.name}: B {title} {count(len(pairs))} questions"
        if len(pairs) > most:
            head += f", {count(most)} of them"
        if pairs:
            head += ":"
        lines.append(head)
        for first, second in pairs[:most]:
            question = " ".join(first.question.split())
            line = f"  {printable(question, LINE)}"
            answer = load_json(first.answer)
            if answer is not None:
                line += f"  ({printable(_final(answer), LINE)})"
            lines.append(line)
            lines.append(f"    A {_judged(first, changed.metric)}")
            lines.append(f"    B {_judged(second, changed.metric)}")
    return lines


def _final(answer: object) -> str:
    """The final answer of a reference; GSM8K's has the solution before it."""
    return str(answer).rpartition("####")[2].strip()


def _judged(result: QuestionResult, metric: str) -> str:
    """`wrong  It is 4.`: of several samples the share or mean, and the first that has the lower value."""
    values = result.values(metric)
    scored = [(float(value), text) for value, text in zip(values, result.texts, strict=True) if value is not None]
    mean = sum(value for value, _ in scored) / len(scored)
    mark = f"{metric} {fixed(mean, 3)}"
    if metric == ACCURACY:
        mark = {1.0: "right", 0.0: "wrong"}.get(mean, mark)
    _, text = min(scored, key=lambda pair: abs(pair[0] - round(mean)))
    return f"{mark:<5}  {printable(' '.join(text.split()), LINE)}"


def verdict(pair: PairedComparison) -> str:
    """`gsm8k: B is better by 0.045 (B − A 95 % +0.010 … +0.080; p = 0.012)`, or that no difference is significant."""
    if not pair.won and not pair.lost:
        return (
            f"{pair.name}: no difference: {pair.metric} is the same for each of the {count(pair.questions)} questions"
        )
    interval = f"B − A 95 % {_difference(pair)}"
    if pair.p >= SIGNIFICANT:
        return f"{pair.name}: no significant difference on these {count(pair.questions)} questions ({interval})"
    side = "B" if pair.difference.value > 0 else "A"
    is_better = "better" if pair.metric in (ACCURACY, "reward") else f"higher in {pair.metric}"
    better = f"{side} is {is_better} by {fixed(abs(pair.difference.value), 3)}"
    p = p_value(pair.p)
    if not p.startswith("<"):
        p = f"= {p}"
    return f"{pair.name}: {better} ({interval}; p {p})"


def p_value(p: float) -> str:
    """`0.012`, `< 0.001`."""
    return "< 0.001" if p < 0.001 else fixed(p, 3)


def _difference(pair: PairedComparison) -> str:
    return f"{signed(pair.difference.low)} … {signed(pair.difference.high)}"


def _side(interval: Interval) -> str:
    return f"{fixed(interval.value, 3)} [{fixed(interval.low, 3)}, {fixed(interval.high, 3)}]"


def pair_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a reward model's last evaluation, from its line of metrics.jsonl: its accuracy next to baselines
    without a model, with 95 % intervals, and a row for each bin of its calibration."""
    rows = [
        {
            "held-out pairs": name,
            "value": fixed(record[key], 3),
            "95 %": f"{fixed(record[f'{key}/low'], 3)}–{fixed(record[f'{key}/high'], 3)}",
            "pairs": f"{record['answers']:,}",
        }
        for key, name in PAIR_FIGURES.items()
    ]
    for key in record:
        if not (key.startswith(BIN) and key.endswith("/pairs")):
            continue
        place = key.removesuffix("/pairs")
        sure = f"{place.removeprefix(BIN)} % sure, {fixed(record[f'{place}/confidence'], 3)} on average"
        value = fixed(record[f"{place}/right"], 3)
        pairs = f"{record[key]:,.0f}"
        rows.append({"held-out pairs": f"right where {sure}", "value": value, "95 %": "", "pairs": pairs})
    return rows


def outcome_text(outcome: EvalOutcome, form: Format, show: int) -> str:
    """The table of an evaluation in a format; as text, after the answers to the first `show` questions of each set; as
    JSON, with every answer."""
    if form == "json":
        answers = {name: list(_answers(groups)) for name, groups in outcome.groups.items()}
        facts = {**outcome.result, "seconds": outcome.seconds, "folder": str(outcome.folder), "answers": answers}
        return table_as(form, (), (), facts)
    if form != "text":
        rows = results_rows(outcome.result, outcome.seconds)
        return table_as(form, rows, result_numbers(outcome.result), None)
    lines: list[str] = []
    for groups in outcome.groups.values():
        lines += graded_lines(groups[:show])
    if lines:
        lines.append("")
    table = results_table(outcome.result, outcome.seconds, sys.stdout)
    return "\n".join([*lines, table, "", f"written to {outcome.folder}", ""])


def graded_lines(groups: Sequence[Group]) -> list[str]:
    """A line per answer: whether it is right, the question, the answer and the expected one."""
    lines = []
    for group in groups:
        expected = ""
        right = group.prompt.answer
        if right is not None:
            answers = right if isinstance(right, list) else [right]
            expected = f"  ({printable(' or '.join(map(_final, answers)))})"
        for completion, score in zip(group.completions, group.scores, strict=True):
            mark = _mark(score)
            lines.append(f"{mark:<6}  {printable(group.prompt.question)}  →  {printable(completion.text)}{expected}")
    return lines


def _mark(score: Score) -> str:
    """`right`, `wrong`, a reward that says neither, or `failed`."""
    if not score.valid:
        return "failed"
    if score.correct is None:
        return fixed(score.value, 3)
    return "right" if score.correct else "wrong"


def _answers(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            yield _answer(group.prompt, completion, score)


def _answer(prompt: Prompt, completion: Completion, score: Score) -> dict[str, Any]:
    reward = score.value if score.valid else None
    return {
        "question": prompt.question,
        "answer": prompt.answer,
        "sample": completion.sample,
        "text": completion.text,
        "correct": score.correct,
        "reward": reward,
        "error": score.error,
        "finish_reason": completion.finish_reason,
    }


def results_comparison(
    first_name: str, second_name: str, *, metric: str | None = None, seed: int = 0, form: Format = "text", show: int = 0
) -> str:
    """Compare two results, question by question, and return the text to print.

    Args:
        first_name, second_name: folders, each of an evaluation or a run.
        metric: what is compared; None: the results' own headline.
        seed: of the bootstrap.
        form: of the text.
        show: print up to so many questions of each set that the second lost, and as many that it gained, with both
            answers.

    Raises:
        UserError: a folder has no result, or neither has the metric.
    """
    names = (first_name, second_name)
    first, second = map(read_result, names)
    if metric is not None:
        metric = METRIC_ALIASES.get(metric, metric)
        measured = metrics_of(first) | metrics_of(second)
        if metric not in measured:
            raise UserError(f"--metric {metric}: neither result has it", remedy=suggestion(metric, measured))
    comparisons = compare_results(first, second, metric=metric, seed=seed)
    changed = []
    if show:
        of_sets = [comparison for comparison in comparisons if comparison.name != "all"]
        changed = [changed_questions(first, second, comparison) for comparison in of_sets]
    if form != "text":
        suites = {comparison.name: asdict(comparison) for comparison in comparisons}
        for each in changed:
            suites[each.name] |= {"lost": each.as_json(each.lost[:show]), "gained": each.as_json(each.gained[:show])}
        facts = {"first": first_name, "second": second_name, "suites": suites}
        numbers = [_flat(asdict(comparison)) for comparison in comparisons]
        return table_as(form, comparison_rows(comparisons), numbers, facts)
    lines = [comparison_table(comparisons, names, sys.stdout)]
    for each in changed:
        lines += ["", *changed_lines(each, show)]
    for name in first.suites:
        unlike = first.sampled_unlike(second, name)
        if unlike:
            keys = " and ".join(f"`{key}`" for key in unlike)
            lines.append(
                f"{name}: the two differ in {keys} too (see result.json), so the difference is not the model's alone"
            )
    return "".join(f"{line}\n" for line in lines)


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a comparison by column, those of an interval as `first/value`, `first/low` …"""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": part for key, part in value.items()}
        else:
            flat[name] = value
    return flat
