"""The file that `engine.url` may name, with the addresses of the servers. It is read again during the run: servers join
and leave by it.

    # one address per line
    http://10.0.0.1:8000
    http://10.0.0.2:8000  # since Tuesday
"""

import asyncio
import re
from pathlib import Path

from proxima.data import FieldError, require
from proxima.engine.http.client import Address

LARGEST = 1 << 20  # bytes
SETTLE_SECONDS = 0.5  # a file that has changed is read again after this: it may be half-written
REMEDY = "write one address per line, http://HOST:PORT"


def file_of(url: str | tuple[str, ...]) -> Path | None:
    """The file that a value of `engine.url` names; None: it has the addresses themselves."""
    if not isinstance(url, str) or not url or "://" in url or re.fullmatch(r"[^/]*:\d*", url):
        return None
    return Path(url).expanduser()


def read_addresses(url: str, token_env: str | None, allow_remote: bool) -> tuple[Address, ...]:
    """The addresses in the file that `url` names.

    Args:
        token_env, allow_remote: see `Address`; for each line.

    Raises:
        FieldError: it can't be read, or names no server, or one twice; a line has no valid address.
    """
    addresses = dict[str, Address]()
    for number, line in enumerate(_read(url).splitlines(), 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip().rstrip("/")
        if not text:
            continue
        try:
            address = Address(text, token_env, allow_remote)
        except FieldError as error:
            if error.field != "url":
                raise
            bound = f"has an invalid line, {number}: {error.value!r} {error.bound}"
            raise FieldError("url", url, bound, remedy=error.remedy) from error
        require(text not in addresses, "url", url, f"names a server twice: {text}", remedy="leave one out")
        addresses[text] = address
    require(bool(addresses), "url", url, "names no server", remedy=REMEDY)
    return tuple(addresses.values())


def _read(url: str) -> str:
    place = Path(url).expanduser()
    try:
        require(place.is_file() or not place.exists(), "url", url, "is not a file", remedy=REMEDY)
        with place.open("rb") as file:
            content = file.read(LARGEST + 1)
        require(len(content) <= LARGEST, "url", url, "has more than 1 MiB", remedy=REMEDY)
        return content.decode()
    except OSError as error:
        bound = f"is neither http://HOST:PORT nor a file that can be read: {error.strerror or error}"
        raise FieldError("url", url, bound, remedy="correct it") from error
    except UnicodeDecodeError as error:
        raise FieldError("url", url, "is not a text in UTF-8", remedy=REMEDY) from error


class ServerFile:
    """The file of a run's servers, which is read again.

    Args:
        url, token_env, allow_remote: as for `read_addresses`.
    """

    def __init__(self, url: str, token_env: str | None, allow_remote: bool) -> None:
        self.url = url
        self._given = (url, token_env, allow_remote)
        self._last: tuple[Address, ...] | str | None = None

    async def news(self) -> tuple[Address, ...] | str | None:
        """The addresses if they have changed since the last call, or the error if it is another one; None: neither."""
        found = await self._read()
        if found == self._last:
            return None
        await asyncio.sleep(SETTLE_SECONDS)
        if found != await self._read():
            return None  # it is being written; the next call reads it again
        self._last = found
        return found

    async def _read(self) -> tuple[Address, ...] | str:
        try:
            return await asyncio.to_thread(read_addresses, *self._given)
        except FieldError as error:
            error.field = f"engine.{error.field}"
            return str(error)
