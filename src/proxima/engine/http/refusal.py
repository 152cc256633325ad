"""A server that refuses the key: it alone is useless, and others may work."""

from proxima.data import UserError
from proxima.engine.http.client import ServerClient


class RefusedError(UserError):
    """Status 401 or 403: every other call to this server would be refused too."""


class ReplicaClient(ServerClient):
    """A client that tells a refused key from all else that the user can repair."""

    def check_status(self, path: str, status: int, text: str) -> None:
        """As `ServerClient.check_status`.

        Raises:
            ServerError: not 2xx.
            RefusedError: 401, 403.
        """
        try:
            super().check_status(path, status, text)
        except UserError as error:
            raise RefusedError(error.reason, remedy=error.remedy) from error
