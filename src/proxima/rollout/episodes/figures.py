"""Statistics of the episodes of a step."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import get_args

from proxima.data.episode import Cut, Span
from proxima.data.flow import Completion

OTHER_FORMAT = "episode/unreadable/"  # before the name of a format that is not the one that is read
LIMITS = tuple(limit for limit in get_args(Cut) if limit)


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Compute statistics of the turns of episodes that did not fail, and counts of all episodes; empty without one.

    Returns: by name, each after `episode/`:
        `turns/mean`, `turns/max`: turns of an episode.
        `calls`, `errors`: tool calls, and those that failed.
        `unreadable`: calls that could not be read.
        `unreadable/hermes`: messages with calls in that format, although another one is read.
        `observation_tokens`: tokens that the environment wrote.
        `cut`, `cut/turns`: episodes that a limit ended, in total and by limit.
        `failed`, `retried`, `forks`: failed episodes, restarts, forks.
        `grammar_fraction`: share of the model's tokens that it wrote under a grammar, where there are some.
    """
    episodes = [completion for completion in completions if completion.episode is not None]
    if not episodes:
        return {}
    facts = [completion.episode for completion in episodes if completion.episode is not None]
    spans = [_spans(completion) for completion in episodes]
    turns = [sum(span.sampled for span in of) for of, fact in zip(spans, facts, strict=True) if not fact.failure]
    everything = list(chain.from_iterable(spans))
    other_formats = Counter(span.written_as for span in everything if span.sampled and span.written_as)
    under_grammar = sum(span.tokens for span in everything if span.sampled and span.grammar)
    free = sum(completion.generated for completion in episodes)
    tokens = sum(len(path.tokens) for completion in episodes for path in completion.paths)
    counts = {
        "calls": sum(len(span.calls) for span in everything if span.sampled),
        "unreadable": sum(len(span.unreadable) for span in everything if span.sampled),
        **{f"unreadable/{name}": messages for name, messages in sorted(other_formats.items())},
        "errors": sum(span.error for span in everything),
        "observation_tokens": tokens - free - under_grammar,
        "cut": sum(bool(fact.cut) for fact in facts),
        **{f"cut/{limit}": sum(fact.cut == limit for fact in facts) for limit in LIMITS},
        "failed": sum(bool(fact.failure) for fact in facts),
        "retried": sum(fact.attempts - 1 for fact in facts),
        "forks": sum(fact.forks for fact in facts),
    }
    figures: dict[str, float] = {}
    if turns:
        figures |= {"turns/mean": sum(turns) / len(turns), "turns/max": max(turns)}
    figures |= counts
    if under_grammar:
        figures["grammar_fraction"] = under_grammar / (under_grammar + free)
    return {f"episode/{name}": float(value) for name, value in figures.items()}


def grammar_note(completions: Sequence[Completion]) -> str:
    """A sentence about the answers that were sampled under a grammar; empty without any."""
    spans = _sampled_spans(completions)
    under = [span for span in spans if span.grammar]
    if not under:
        return ""
    count = f"{len(under)} of {len(spans)} messages of the model were sampled under a grammar"
    return f"{count}, as its agent asked; their tokens are not trained, since the engine does not report the mask"


def other_format_notes(completions: Sequence[Completion]) -> list[str]:
    """A warning for each format in which the model wrote calls although another is read, the most frequent first."""
    spans = _sampled_spans(completions)
    turns = len(spans)
    written = Counter((span.written_as, span.unreadable[0]) for span in spans if span.written_as)
    notes = []
    for (name, why), count in written.most_common():
        remedy = f"set episode.tool_format={name}, or show the model in the system prompt how to call"
        notes.append(f"in {count} of {turns} messages of the model {why}, so that no tool was called; {remedy}")
    return notes


def _sampled_spans(completions: Sequence[Completion]) -> list[Span]:
    """The messages of the model."""
    spans = chain.from_iterable(map(_spans, completions))
    return [span for span in spans if span.sampled]


def _spans(completion: Completion) -> list[Span]:
    spans: list[Span] = []
    for path in completion.paths:
        if path.episode is not None:
            spans += path.episode.spans
    return spans
