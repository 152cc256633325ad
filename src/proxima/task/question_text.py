"""The text by which questions are compared: repeats, evaluation questions and the held-out part are found by it."""

import re
import unicodedata

from proxima.system.jsonl import utf8

# Instructions that published data sets put around the question, verbatim.
_BEFORE = re.compile(  # DAPO-Math-17k and its AIME-2024; some copies ask for \boxed{$Answer}, some write $ANSWER
    r"\s*Solve the following math problem step by step\.\s+The last line of your response should be of the form "
    r"Answer: .{1,60}? where \$Answer is the answer to the problem\.\s*",
    re.IGNORECASE,
)
_AFTER = (
    re.compile(r'\s*Remember to put your answer on its own line after "Answer:"[^\n]{0,80}\s*\Z'),
    re.compile(
        r"\s*Let's think step by step and output the final answer (?:after \"####\"|within \\boxed\{\})\.?\s*\Z"
    ),
    re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{\}\.?\s*\Z"),
)
_AFTER_PREFIXES = ("Remember to put", "Let's think step", "Please reason step")  # tested before the patterns, for speed

# Unicode's default ignorables: zero-width spaces and joiners, byte order marks, soft hyphens, variation selectors.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SPACE_BEFORE_MARK = re.compile(r" +(?=[?!.,;:](?: |\Z))")  # the space of `2 + 2 ?`


def strip_instructions(text: str) -> str:
    """Remove known instructions before and after the question, and outer whitespace."""
    match = _BEFORE.match(text)
    if match:
        text = text[match.end() :]
    if any(prefix in text for prefix in _AFTER_PREFIXES):
        for pattern in _AFTER:
            text = pattern.sub("", text)
    return text.strip()


def normalize(text: str) -> str:
    """Return the question without instructions, as it appears on the page: equal texts are the same question.

    Invisible characters are removed, the rest is converted to Unicode's NFKC, runs of whitespace become one space, and
    spaces before a punctuation mark are removed (`2+2 ?`). Case is kept: `A` and `a` may be two quantities. NFKC also
    turns x² into x2; two questions that clash because of this show up as a conflict of answers.
    """
    visible = INVISIBLE.sub("", utf8(text))
    question = unicodedata.normalize("NFKC", strip_instructions(visible))
    one_line = " ".join(question.split())
    return _SPACE_BEFORE_MARK.sub("", one_line)
