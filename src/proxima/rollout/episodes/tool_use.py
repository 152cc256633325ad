"""How the model sees the tools of an episode, and calls them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from proxima.environment.call_readers import Parameters, ToolFormat
from proxima.environment.tool_calls import describe_tools, format_of, parameters_of
from proxima.model.chat.encode import Tokenizer
from proxima.rollout.episodes.conversation import TurnTemplate

KEPT = 64  # sets of tools


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of an episode, for the model.

    Args:
        template: renders the messages, with the tools if it can.
        tool_format: the format in which the model writes calls; None: it has no tools.
        tools: the schemas of their parameters.
        instructions: text of the system message that describes the tools if the chat template can't.
    """

    template: TurnTemplate
    tool_format: ToolFormat | None = None
    tools: Parameters = field(default_factory=dict)
    instructions: str = ""


class ToolUses:
    """The `ToolUse` of each set of tools: one for a task, or one for each set that its rows have.

    Args:
        tokenizer: the policy's.
        arguments: those of the chat template.
        named: `episode.tool_format`.
    """

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any], named: ToolFormat | str) -> None:
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._named = named
        self._of = lru_cache(maxsize=KEPT)(self._made)

    @property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes calls, where it has tools."""
        if self._named == "auto":
            return format_of(self._tokenizer, self._arguments)
        return cast("ToolFormat", self._named)

    def __call__(self, schemas: Sequence[Mapping[str, Any]]) -> ToolUse:
        return self._of(json.dumps(list(schemas)))

    def _made(self, text: str) -> ToolUse:
        schemas = json.loads(text)
        template = TurnTemplate(self._tokenizer, self._arguments, schemas)
        if not schemas:
            return ToolUse(template=template)
        chosen = self.tool_format
        if template.supports_tools:
            instructions = ""
        else:
            instructions = describe_tools(schemas, chosen)
        tools = parameters_of(schemas)
        return ToolUse(template=template, tool_format=chosen, tools=tools, instructions=instructions)
