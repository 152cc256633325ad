"""Prompt templates: the text around a question, and a system prompt."""

from dataclasses import dataclass
from pathlib import Path

from proxima.data import FieldError
from proxima.data.flow import Message
from proxima.system.user_files import read_text
from proxima.task.prompts import with_system
from proxima.task.protocol import user_message
from proxima.task.template import fill, require_question_template


@dataclass(frozen=True)
class Template:
    """A prompt around a question.

    Args:
        name: key in `TEMPLATES`, or `own`.
        text: the user message, with `{question}`; a literal brace is written twice.
        system: system prompt; None: none.
    """

    name: str
    text: str
    system: str | None = None

    def messages(self, question: str) -> list[Message]:
        """Return the chat that asks the question."""
        text = fill(self.text, {"question": question})
        return list(with_system(user_message(text), self.system))


TEMPLATES: dict[str, Template] = {
    "plain": Template("plain", "{question}"),
    # The instruction in DAPO-Math-17k itself (arXiv 2503.14476), verbatim: the answer is the text after `Answer:`.
    "dapo": Template(
        "dapo",
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
        'Remember to put your answer on its own line after "Answer:".',
    ),
    # The instruction in the model cards of Qwen2.5-Math and DeepSeek-R1.
    "boxed": Template("boxed", "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."),
    "gsm8k": Template("gsm8k", "{question}\nThink step by step, then give the final number after ####."),
    # Tags as in the GSM8K runs of completion pruning (arXiv 2503.22342), worded as in recipes/gsm8k.yaml.
    "think_answer": Template(
        "think_answer",
        "{question}",
        "Think about the question first, then answer it. Write your thoughts between <think> and </think>, and on "
        "the next line the final answer alone between <answer> and </answer>.",
    ),
}


def resolve_template(text: str, system: str | None = None) -> Template:
    """Resolve a preset by name, a text with `{question}`, or a file with such a text (`@prompt.txt`).

    Args:
        text: as above; in a text given directly, backslash and n are a newline, because shells pass them so.
        system: system prompt in place of the preset's; an empty one removes it; None keeps it.
    Raises:
        UserError: an unknown name, an unreadable file, a text without `{question}` or with other braces.
    """
    if text in TEMPLATES:
        template = TEMPLATES[text]
    elif "{" not in text and not text.startswith("@"):
        remedy = f"take one of {', '.join(TEMPLATES)}, or a text with {{question}} in it"
        raise FieldError("template", text, "is not a template", remedy=remedy)
    elif text.startswith("@"):
        template = Template("own", _from_file(text.removeprefix("@")))
    else:
        template = Template("own", text.replace("\\n", "\n"))
    require_question_template(template.text)
    if system is None:
        return template
    return Template(template.name, template.text, system or None)


def _from_file(name: str) -> str:
    try:
        return read_text(Path(name).expanduser()).removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        remedy = "name a text file that holds {question}"
        raise FieldError("template", f"@{name}", f"can't be read ({why})", remedy=remedy) from None
