"""Whether a server still has the weights that it was given, asked once for all who want to know."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from proxima.engine.http.client import RefusedError, ServerError
from proxima.engine.http.dialect import ServerHealth


class WeightsCheck:
    """Asks one server what it has.

    A server that is started again has the weights of its start, under another label, until it is given ours. So if it
    says our label, all that it has sampled since it was given them is of these weights: one answer proves every
    completion that ended, or gave a token, before the question. Those who come while it is being asked share the next
    question.

    Args:
        ask: the health check of the server.
        url: of the server, for messages.
    """

    def __init__(self, ask: Callable[[], Awaitable[ServerHealth]], url: str) -> None:
        self._ask, self._url = ask, url
        self._ticks, self._asked_at = count(1), 0
        self._found: ServerHealth | ServerError | RefusedError | None = None
        self._asking = asyncio.Lock()

    async def ask(self, seconds: float) -> ServerHealth:
        """What the server says when it is asked after this call.

        Args:
            seconds: deadline of the question.

        Raises:
            ServerError, RefusedError: it does not say it.
        """
        came_at = next(self._ticks)
        async with self._asking:
            if self._asked_at < came_at:
                self._asked_at = next(self._ticks)
                self._found = None
                self._found = await self._answer(seconds)
            found = self._found
        if found is None:  # whoever asked was cancelled
            return await self.ask(seconds)
        if isinstance(found, Exception):
            raise found
        return found

    async def _answer(self, seconds: float) -> ServerHealth | ServerError | RefusedError:
        try:
            async with asyncio.timeout(seconds):
                return await self._ask()
        except TimeoutError:
            return ServerError(self._url, "", f"no answer to a health check for {seconds:g} s")
        except (ServerError, RefusedError) as error:
            return error

    async def over(self) -> None:
        """Wait for the answers to all who came before: new weights must not be loaded between question and answer."""
        async with self._asking:
            pass
