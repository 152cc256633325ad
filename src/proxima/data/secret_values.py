"""Detect texts in a config that look like secrets: they are refused where they would be written, and masked in
errors."""

import re

HIDDEN = "…"  # in place of a value that may be a secret
SECRET_WORDS = {"apikey", "auth", "cookie", "credential", "credentials", "key", "passphrase", "passwd", "password"}
SECRET_WORDS |= {"pwd", "secret", "token"}
_KNOWN = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|eyJ)[\w.-]{6,}|-----BEGIN .*"
    r"|(?<=://)[^/@\s]*:[^/@\s]+(?=@)",  # keys by how they begin, and a user with a password in an address
    re.DOTALL,
)
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+=]{20,}")


def is_secret_name(name: str) -> bool:
    """True for names of secrets, such as `HF_TOKEN` and `--api-key`."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def is_secret_value(value: str) -> bool:
    """True if a text is or contains a key: a known prefix, a password in a URL, or a long random string."""
    return _KNOWN.search(value) is not None or _RANDOM.fullmatch(value.strip()) is not None


def without_secrets(text: str) -> str:
    """The text, masked where it has a key of a known form."""
    return _KNOWN.sub(HIDDEN, text)
