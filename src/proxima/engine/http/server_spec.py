"""The spec that all engines over HTTP derive from."""

from dataclasses import dataclass

from proxima.engine.http.server_checks import check_servers_of
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import EngineNeeds


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ServerSettings):
    """An engine that is one or more servers; `ServerSettings` has the fields. A kind of server defines `dialect`."""

    def check(self, needs: EngineNeeds) -> list[str]:
        """See `EngineSpec.check`. Servers that run already are asked; those that proxima starts can only be asked once
        they run, by `HttpEngine.check`."""
        if self.serve is not None:
            self.check_servers(needs.model_path)
            return []
        return check_servers_of(self, needs)
