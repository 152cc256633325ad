"""Who may ask an HTTP server of proxima.

A web page in a browser can address a server on the browser's machine: by a name that resolves to it (`Host`), or from
the page's own site (`Origin`). Programs send no `Origin`.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_NAME = r"[^\[\]:@/?#\\\s]+"
_ADDRESS = r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.~-]+)?)\]"
_HOST = re.compile(rf"(?:({_NAME})|{_ADDRESS})(?::[0-9]{{0,5}})?", re.ASCII)


def name_in_host(host: str) -> str:
    """The name or address in a `Host` header, in lower case; empty if the header is malformed."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else ""


def refused(headers: Mapping[str, str], names: Collection[str], remedy: str) -> tuple[int, str] | None:
    """Return status and reason for a request whose `Host` has none of the names, or which comes from a page of another
    site; None if it is allowed. `remedy` says how a name is allowed."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if name_in_host(host) not in names:
        return 403, f"Host {host!a:.60} is not allowed; {remedy}"
    if origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return None
    _, separator, place = origin.partition("://")
    if separator and not name_in_host(place):
        return 400, f"Origin {origin!a:.60} is malformed"
    return 403, f"Origin {origin!a:.60} is not allowed: requests of web pages of other sites are refused"


def is_loopback(host: str) -> bool:
    """Return True if a host name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
