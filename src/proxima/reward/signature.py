"""Derives from a user function's signature how to call it: once for each completion, or as TRL or verl call it."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from proxima.data.episode import Span
from proxima.data.flow import Completion, Prompt

LISTS = ("prompts", "completions", "completion_ids")  # TRL's names; a function with one of them takes lists
PASSED = {"each": ("prompt", "completion"), "lists": LISTS, "verl": ("solution_str", "extra_info")}
EPISODE = "episode"  # in each style: the messages after the prompt, if the function names it


@dataclass(frozen=True)
class CallShape:
    """The calling convention of a function.

    Args:
        style: `each`: per completion; `lists`: per group, in TRL's names; `verl`: per completion, in verl's names.
        leading: parameters that get prompt and completion by position: the first two if none has one of these names.
        named: parameters that are passed by name.
        required: those in `named` without a default that only a column can supply.
        everything: the function has `**columns` and gets all values.
        texts: parameters annotated `str` or `str | None`, which get the text of a prompt or completion.
    """

    style: Literal["each", "lists", "verl"]
    leading: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    everything: bool
    texts: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "CallShape":
        """Read the signature; TypeError, with the reason, if the function can't be called with the data of a reward."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C have no signature; a mismatch shows at the first call
            return cls("each", PASSED["each"], frozenset(), frozenset(), False, frozenset())
        parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        by_name = {p.name for p in parameters if p.kind != p.POSITIONAL_ONLY}
        kinds = {p.kind for p in signature.parameters.values()}
        style: Literal["each", "lists", "verl"] = "each"
        if by_name.intersection(LISTS):
            style = "lists"
        elif "solution_str" in by_name:
            style = "verl"
        leading: tuple[str, ...] = ()
        if style == "each" and not by_name.intersection((*PASSED["each"], EPISODE)):
            leading = tuple(p.name for p in parameters if p.kind != p.KEYWORD_ONLY)[:2]
            leading += PASSED["each"][len(leading) :] if inspect.Parameter.VAR_POSITIONAL in kinds else ()
            if len(leading) < 2:
                raise TypeError("name a parameter completion")
        rest = [p for p in parameters if p.name not in leading]
        for p in rest:
            if p.kind == p.POSITIONAL_ONLY:
                raise TypeError(f"{p.name!r} is positional-only, but columns are passed by name")
        return cls(
            style=style,
            leading=leading,
            named=frozenset(p.name for p in rest),
            required=frozenset(p.name for p in rest if p.default is p.empty).difference((*PASSED[style], EPISODE)),
            everything=inspect.Parameter.VAR_KEYWORD in kinds,
            texts=frozenset(p.name for p in parameters if _is_text(p.annotation)),
        )

    @property
    def gets_tokens(self) -> bool:
        """True if the function sees the tokens of a completion, not only its text."""
        if self.style == "each":
            name = (self.leading or PASSED["each"])[1]
            return name not in self.texts and bool(self.leading or self.everything or name in self.named)
        return self.style == "lists" and "completion_ids" in self.named

    def problem(self, columns: Collection[str]) -> tuple[str, str] | None:
        """The problem with rows of these columns, and its remedy; None if the function can be called with them."""
        for name in self.leading:
            if name in columns:
                where = f"has the parameter {name!r} in the place of prompt or completion, and it is a column"
                return where, "name those two parameters prompt and completion"
        for name in sorted(self.required.difference(columns)):
            near = difflib.get_close_matches(name, columns, 1)
            hint = f"did you mean {near[0]!r}? columns" if near else "columns"
            if self.style == "verl" and name == "ground_truth":
                hint = "map the answer with task.answer=COLUMN; columns"
            return f"has the parameter {name!r}, which is not a column", f"{hint}: {', '.join(columns) or 'none'}"
        return None

    def columns(self, row: "HasColumns") -> dict[str, Any]:
        """The values of a row that the function can take by name; verl's `ground_truth` may be in another column."""
        return row_columns(row) | (_ground_truth(row) if self.style == "verl" else {})

    def for_one(self, prompt: Prompt, completion: Completion) -> dict[str, Any]:
        """The arguments with which a worker calls the function for a completion. A prompt or completion that is passed
        as an object is sent as JSON, with the name of its parameter."""
        columns = self.columns(prompt)
        if EPISODE in self.named:
            columns = {EPISODE: messages_of(completion)} | columns
        if self.style == "verl":
            given = {"extra_info": {}} | columns | {"solution_str": completion.text}
            return {"values": self._chosen(given), "verl": True}
        names = dict(zip(PASSED["each"], self.leading or PASSED["each"], strict=True))
        texts, objects = {"prompt": prompt.question, "completion": completion.text}, {}
        passed: dict[str, Any] = {}
        for kind, name in names.items():
            if name in self.texts:
                passed[name] = texts[kind]
            elif self.leading or self.everything or name in self.named:
                passed[name] = (prompt if kind == "prompt" else completion).to_json()
                objects[kind] = name
        columns = {name: value for name, value in columns.items() if name not in names.values()}
        return {"values": passed | self._chosen(columns), "positional": len(self.leading), **objects}

    def for_group(self, prompt: Prompt, completions: Sequence[Completion], chat: bool | None) -> dict[str, Any]:
        """The keyword arguments of a function that takes lists."""
        count = len(completions)
        values = {name: [value] * count for name, value in row_columns(prompt).items()}
        values.pop("prompt", None), values.pop("completion", None)
        if EPISODE in self.named:
            values = {EPISODE: list(map(messages_of, completions))} | values
        if prompt.chat if chat is None else chat:
            values["prompts"] = [list(prompt.messages)] * count
            values["completions"] = list(map(messages_of, completions))
        else:
            values["prompts"] = [prompt.question] * count
            values["completions"] = [completion.text for completion in completions]
        return self._chosen(values | {"completion_ids": [completion.tokens.tolist() for completion in completions]})

    def _chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.everything or name in self.named}


def _is_text(annotation: Any) -> bool:
    """Return True for `str` or `str | None`, given as an object or as source text."""
    if isinstance(annotation, str):
        inner = annotation.replace(" ", "").removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
        return inner in ("str", "str|None", "None|str")
    return annotation in (str, str | None)


def messages_of(completion: Completion) -> list[dict[str, str]]:
    """The messages after the prompt: for an episode all of them, with the model's messages as it wrote them, even if a
    template changed them later; otherwise only the completion's text."""
    spans: dict[tuple[int, bool], Span] = {}
    for path in completion.paths:
        for span in path.episode.spans if path.episode is not None else ():
            key = span.turn, span.role != "assistant"
            if span.sampled or key not in spans:
                spans[key] = span
    turns = [{"role": span.role, "content": span.text} for _, span in sorted(spans.items())]
    return turns or [{"role": "assistant", "content": completion.text}]


class HasColumns(Protocol):
    """A prompt, or the row from which it is built."""

    @property
    def answer(self) -> Any: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


def row_columns(row: HasColumns) -> dict[str, Any]:
    """The row's columns; `answer` is the column that the task maps as such, if any."""
    return dict(row.metadata) | ({} if row.answer is None else {"answer": row.answer})


def _ground_truth(row: HasColumns) -> dict[str, Any]:
    """The row's answer, else that in its `reward_model`, as verl's `ground_truth`. Empty if the row has neither, or has
    no answer but a column `ground_truth`."""
    if row.answer is not None:
        return {"ground_truth": row.answer}
    nested = row.metadata.get("reward_model")
    columns = nested if isinstance(nested, Mapping) and "ground_truth" not in row.metadata else {}
    return {"ground_truth": columns["ground_truth"]} if "ground_truth" in columns else {}
