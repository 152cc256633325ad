"""The classes for users who write an environment: `Environment` and its `Reply`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data.flow import Message


@dataclass(frozen=True)
class Reply:
    """An answer to the model from an environment or one of its tools, for answers that are more than a text.

    Args:
        content: a text, or complete messages; empty: none.
        role: who reads it and speaks next, in an environment with `roles`; None: who has just spoken. The chat of a
            role begins with the row's system messages and what it reads first.
        images: PIL images or bytes of image files that the text shows, each where the text has `<image>`, or before the
            text if it has none. Messages have their own: `{"role", "content", "images"}`.
        reward: reward of the turn that it answers, in reward units.
        done: the episode ends; the content is not shown to the model.
        state: the environment's name for its state from now on, see `Span.state`.
    """

    content: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False
    state: str | None = None
    role: str | None = None
    images: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class RewardWithParts:
    """The reward of an episode, or that of each role of an agent, and the values from which it was computed, by
    name."""

    value: float | Mapping[str, float]
    parts: Mapping[str, float]


class Environment:
    """A world in which the model acts. Subclassing is optional: any class with some of these methods qualifies. An
    object is created for each episode, `Class(**arguments of the recipe)`, in a worker process; methods may be `async`.

    Public methods with type hints and a docstring are tools, whose schemas the chat template shows to the model
    (`transformers.utils.get_json_schema`); their results are returned as messages of role `tool`, and may be images if
    the recipe sets `episode.images`. A model message that calls no tool is passed to the method `respond`, whose answer
    is a message of role `user`; without `respond`, the episode ends with the first such message.

    A class whose tools are known only after instantiation has `tools()`, which returns their schemas in the same form,
    and `call_tool(name, arguments)`. All environments of a recipe must have the same tools, unless the class sets
    `tools_by_row`: then `tools()` is asked after `reset`, and its schemas are those of the row.

    A class with `roles`, names, is played by several: each role has a chat of its own, its own reward and its own
    baseline. `reset` opens the chat of the first, or of `Reply.role`, and each answer says by `Reply.role` who is next;
    `get_reward` returns a number for each role, by name, or one for all.

    An attribute `done` ends the episode after the call that set it. `get_reward()`, or an attribute `reward`, is read
    once at the end and added to the rewards of the turns (`Reply.reward`). It is a number, or a `RewardWithParts`. A
    `get_reward` with a parameter `messages` receives what was said after the prompt, as messages of chat completions:
    those of the model with their `tool_calls`, and those that answered them, with the `tool_call_id` of each.
    """

    tools_by_row: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ()

    def reset(self, row: Mapping[str, Any], seed: int) -> str | Sequence[Message] | Reply | None:
        """Begin an episode. Anything random must depend only on `row` and `seed`, so that a group's episodes begin
        alike.

        Args:
            row: the columns of the row, including `messages` and `answer`. A method that names columns as parameters,
                or takes `**columns`, receives these by name.
            seed: the same for the completions of a prompt.
        Returns: a text that is appended to the last user message, messages that replace the row's, or None; a `Reply`
            around either of them can also name the state.
        """
        return None
