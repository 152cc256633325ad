"""Plays synthetic episodes through a chat template to find out, before a run, how it would treat real ones."""

from collections.abc import Iterator, Sequence

import numpy as np

from proxima.data import Message, UserError
from proxima.rollout.episodes.conversation import Conversation, ForkRefused, TurnTemplate

TURNS = {
    "a turn calls a tool": '<tool_call>\n{"name": "search", "arguments": {"query": "7"}}\n</tool_call>',
    "a turn thinks": "<think>\nSeven?\n</think>\n\nIt is 7.",
    "a turn ends with a space": "It is 7. ",
    "a turn is empty": "",
}


def check_template(
    template: TurnTemplate, openings: Sequence[Sequence[Message]], roles: Sequence[str] = ("tool", "user")
) -> list[UserError]:
    """Check a template with episodes that have these openings; return the problems as errors of one line each. If it
    only rewrites what the model saw, the error is a ForkRefused, and only one if it does so at every turn. The model's
    turns are synthetic: a tool call, a thought, a space at the end, an empty turn.

    Args:
        roles: roles of the messages that answer the model's turns.
    """
    problems: dict[str, UserError] = {}
    if template.tools and not template.supports_tools:
        remedy = "set episode.tool_format to xml or code, which describe the tools in the system message"
        problems["tools"] = UserError("the model's chat template shows no tools", remedy=remedy)
    errors = [each for opening in openings for each in _errors(template, opening, roles)]
    forks = sum(isinstance(error, ForkRefused) for _, error in errors)
    if errors and forks == len(openings) * len(TURNS) * len(roles):
        errors = [("at every turn", errors[0][1])]
    for place, error in errors:
        kind = ForkRefused if isinstance(error, ForkRefused) else UserError
        problems.setdefault(error.reason, kind(f"{place}, {error.reason}", remedy=error.remedy))
    return list(problems.values())


def _errors(
    template: TurnTemplate, opening: Sequence[Message], roles: Sequence[str]
) -> Iterator[tuple[str, UserError]]:
    """Yield the first error of each synthetic episode, with a description of the episode."""
    for turn, text in TURNS.items():
        tokens = template.tokenizer(text + (template.tokenizer.eos_token or ""), add_special_tokens=False)["input_ids"]
        for role in roles:
            try:
                conversation = Conversation(template, opening, "refuse")
                for _ in range(2):
                    conversation.add_turn(np.array(tokens, np.int32), text, "stop")
                    conversation.observe([{"role": role, "content": "Right."}])
            except UserError as error:
                yield f"where {turn} and the {role} answers", error
