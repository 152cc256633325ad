"""The classes that a user writes: an environment, and its replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data import Message


@dataclass(frozen=True)
class Reply:
    """The answer of an environment, or of one of its tools, to the model, if it is more than a text.

    Args:
        content: a text, or messages in full; empty: none.
        reward: of the turn that it answers, in reward units.
        done: the episode ends; the content is not shown to the model.
        state: what the environment calls its state from now on, see `Span.state`.
    """

    content: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False
    state: str | None = None


class Environment:
    """A world that the model acts in. Subclassing is optional: every class with some of these methods is one. An
    object is made for each episode, `Class(**arguments of the recipe)`, in a worker process; any method may be `async`.

    Public methods with type hints and a docstring are tools, whose schemas the chat template shows to the model
    (`transformers.utils.get_json_schema`); their results are answered as messages of role `tool`. With a method
    `respond`, what the model writes goes there instead where it calls no tool, and the answer is a message of role
    `user`; without it an episode ends with the first message that calls no tool.

    A class whose tools are only known when one is made has `tools()`, which returns their schemas in that form, and
    `call_tool(name, arguments)`. All environments of a recipe must have the same.

    `done`, an attribute, ends the episode after the call that set it. `get_reward()`, or an attribute `reward`, is read
    once at the end and is added to the rewards of the turns (`Reply.reward`).
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> str | Sequence[Message] | Reply | None:
        """Begin. Everything random must come from `row` and `seed`: the completions of a group begin alike.

        Args:
            row: the columns of the row; `messages` and `answer` among them. A method that names columns as parameters,
                or takes `**columns`, gets these by name.
            seed: the same for the completions of a prompt.
        Returns: a text that is appended to the last user message, messages that replace the row's, or None; a `Reply`
            with one of them names the state, too.
        """
        return None
