"""Recognises config values that look like secrets: they are never written to disk, and are masked in errors."""

import re

HIDDEN = "…"  # in place of a value that may be a secret
SECRET_WORDS = {"apikey", "auth", "cookie", "credential", "credentials", "key", "passphrase", "passwd", "password"}
SECRET_WORDS |= {"pwd", "secret", "token"}
_KNOWN = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|eyJ)[\w.-]{6,}|-----BEGIN .*"
    r"|(?<=://)[^/@\s]*:[^/@\s]+(?=@)",  # keys by their prefix, and user:password in a URL
    re.DOTALL,
)
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+=]{20,}")


def is_secret_name(name: str) -> bool:
    """Return True if the name suggests a secret: `HF_TOKEN`, `--api-key`."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def is_secret_value(value: str) -> bool:
    """Return True if the text contains or is a secret: a known prefix, a password in a URL, or long and random."""
    return _KNOWN.search(value) is not None or _RANDOM.fullmatch(value.strip()) is not None


def without_secrets(text: str) -> str:
    """The text with keys of a known form masked."""
    return _KNOWN.sub(HIDDEN, text)
