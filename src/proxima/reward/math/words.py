"""Answers that are words, and words in a formula that are no mathematics."""

from proxima.reward.math.latex import (
    FONTS,
    FUNCTIONS,
    groups_of,
    is_command,
    is_word,
    plain_text,
    tokenize,
    without_groups,
)
from proxima.reward.math.numeric_answer import MAX_CHARS

_NAMED_GROUPS = FONTS | {r"\begin", r"\end", r"\mathbb", r"\mathcal", r"\mathfrak", r"\mathscr"}
_IN_FORMULAS = FUNCTIONS | {"infty", "frac", "pi", "or", "and"}


def normalize_words(formula: str) -> str:
    """The text in lower case and without typesetting, see `plain_text`; empty for over 4,000 characters."""
    if len(formula) > MAX_CHARS:
        return ""
    return " ".join(plain_text(formula).casefold().split())


def parse_words(formula: str) -> str | None:
    r"""The normalized words of a formula that is only words (`even`, `\text{no solution}`, `\text{(A)}`), else None.

    Outside of `\text` and the like, only a single word of two letters or more counts.
    """
    words = normalize_words(formula)
    if not (words[:1].isalpha() and words[-1:].isalpha() and all(c.isalpha() or c in " ,.'/-" for c in words)):
        return None
    tokens = tokenize(formula)
    bare = without_groups(tokens, groups_of(tokens, is_command)).strip(" .$")
    if bare and (" " in words or "\\" in bare or not _is_bare_word(words)):
        return None
    return words


def _is_bare_word(words: str) -> bool:
    """Return True for `even` and `merry-go-round`, and not for `p-q` and `a/b`, which are formulas."""
    parts = [token for token in tokenize(words) if is_word(token)]
    return words.isascii() and (len(words) == len(parts[0]) > 1 or max(map(len, parts)) > 2)


def is_prose(formula: str) -> bool:
    r"""True if a parser would read words of the formula as products of letters: several bare words, or a long one."""
    tokens = tokenize(formula)
    bare = tokenize(without_groups(tokens, groups_of(tokens, _NAMED_GROUPS.__contains__)).strip())
    words = [token for token in bare if is_word(token) and token not in _IN_FORMULAS]
    if any(len(word) > 3 for word in words):
        return True
    if bare and bare[-1] in (".", "!", "?"):
        bare.pop()
    is_sentence = bare.count(" ") > 0 and all(is_word(token) or token in (" ", "'") for token in bare)
    return is_sentence and any(len(word) > 1 for word in words)
