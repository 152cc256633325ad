"""Checks before a run that an answer can contain what the rewards and tools look for. The chat template, the tokenizer
and the stop strings may make that impossible.

A warning is certain: every match contains some text that no answer can contain.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data.errors import quoted
from proxima.data.flow import Prompt
from proxima.engine.protocol import Sampling
from proxima.environment.call_readers import ToolFormat, read_calls
from proxima.environment.tool_calls import PARAMETERS, TRIAL, write_call
from proxima.model.chat.encode import control_texts
from proxima.model.chat.written_text import sampled_text, stop_string
from proxima.reward.base import as_reward
from proxima.reward.patterns import RequiredText, required_text

TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, kw_only=True)
class AnswerTexts:
    """What the texts of answers have in common.

    Args:
        prompts: some of the prompts.
        stop: the strings that end an answer; `name` is their field in the config.
        stop_tokens: ids that end one.
    """

    tokenizer: Any
    prompts: Sequence[Prompt]
    stop: Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    name: str = "sampling.stop"

    def notes(self, rewards: Sequence[Any], path: str = "reward") -> list[str]:
        """A warning for each pattern of the rewards that no answer can match."""
        notes = []
        for reward in map(as_reward, rewards):
            for pattern in reward.text_patterns:
                why = next(self._problems(required_text(pattern)), None)
                if why:
                    notes.append(f"{path}: {reward.label} can't find {quoted(pattern, 80)} in any answer: {why}")
        return notes

    def _problems(self, needed: RequiredText) -> Iterator[str]:
        ends = [text for text in control_texts(self.tokenizer) if self._ends_turns(text)]
        for number, run in enumerate(needed.runs):
            last = number == len(needed.runs) - 1
            yield from self._behind_the_end(run, ends)
            yield from self._behind_a_stop(run, last)
            yield from self._unencodable(run)
        if needed.runs:
            yield from self._of_prompts(needed)

    def _ends_turns(self, text: str) -> bool:
        return self.tokenizer.convert_tokens_to_ids(text) in self.stop_tokens and not text.startswith("</")

    def _behind_the_end(self, run: str, ends: Sequence[str]) -> Iterator[str]:
        for end in ends:
            if end in run:
                yield f"{end} ends the turn, and is no part of its text"

    def _behind_a_stop(self, run: str, last: bool) -> Iterator[str]:
        """An answer ends with the first stop string, and the match must go on behind it."""
        if any(_shares(prompt.begun, run) for prompt in self.prompts):
            return  # a part of it may be the prompt's, in which nothing stops
        found = stop_string(run, self.stop)
        if found is not None and not (last and found[1] == len(run)):
            end = quoted(run[slice(*found)])
            yield f"{self.name} has {end}, with which an answer ends, and {quoted(run)} is needed whole"

    def _unencodable(self, run: str) -> Iterator[str]:
        read = sampled_text(self.tokenizer, self.tokenizer(run, add_special_tokens=False)["input_ids"])
        if run.strip() not in read:
            yield f"the tokenizer reads {quoted(run)} as {quoted(read)}"

    def _of_prompts(self, needed: RequiredText) -> Iterator[str]:
        """Every prompt begins its answer in a way with which the pattern does not begin, or ends with its first tag."""
        first = needed.runs[0]
        begun = [prompt.begun for prompt in self.prompts]
        if needed.anchored and begun and all(map(bool, begun)):
            texts = begun
            if needed.after_space:
                texts = [text.lstrip() for text in begun]
            if not any(text.startswith(first) or first.startswith(text) for text in texts):
                beginning = quoted(begun[0], 60)
                yield f"every answer begins with {beginning}, which is in the prompt, and a match with {quoted(first)}"
        tag = TAG.match(first)
        if tag is None or any(begun) or not self.prompts:
            return
        if all(_last_text(prompt).rstrip().endswith(tag[0]) for prompt in self.prompts):
            what = f"the prompts end with {tag[0]}, behind which the text of an answer begins"
            yield f"{what}; leave it out of the prompts, or out of the pattern"


def _shares(begun: str, run: str) -> bool:
    """True if a run, or its beginning, may be in the beginning of an answer."""
    if not begun:
        return False
    return run in begun or any(begun.endswith(run[:n]) for n in range(1, len(run) + 1))


def _last_text(prompt: Prompt) -> str:
    """The text with which a prompt without a chat template ends."""
    if not prompt.messages:
        return ""
    last = prompt.messages[-1]
    if last.get("raw"):
        return str(last.get("content", ""))
    return ""


def call_notes(tool_format: ToolFormat, sampling: Sampling, path: str) -> list[str]:
    """A warning if a stop string ends a turn within every tool call."""
    tools = {TRIAL.name: PARAMETERS}
    call = write_call(TRIAL, tool_format, tools)
    found = stop_string(call, sampling.stop)
    if found is None or read_calls(call[: found[1]], tool_format, tools).calls == (TRIAL,):
        return []
    if read_calls(call, tool_format, tools).calls != (TRIAL,):
        return []
    shown = call[slice(*found)]
    return [f"{path}: sampling.stop has {quoted(shown)}, which ends a turn within a tool call (format {tool_format})"]
