"""The spec that all engines over HTTP derive from."""

from dataclasses import dataclass

from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.folder_sync import FolderSync
from proxima.engine.http.generation_job import CompletionRules
from proxima.engine.http.server_checks import check_servers_of, check_weight_folder
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import EngineNeeds, EngineSetup


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ServerSettings):
    """An engine that is one or more servers; `ServerSettings` has the fields. A kind of server defines `dialect`."""

    def check(self, needs: EngineNeeds) -> list[str]:
        """See `EngineSpec.check`. Servers that run already are asked; those that proxima starts can only be asked once
        they run, by `HttpEngine.check`."""
        if needs.publishes:
            check_weight_folder(self.weight_folder)
        if self.serve is not None:
            self.check_servers(needs.model_path)
            return []
        return check_servers_of(self, needs)

    def build(self, setup: EngineSetup) -> HttpEngine:
        """The engine; the servers answer.

        Raises:
            UserError: they do not, or differ from one another or from the model.
        """
        rules = CompletionRules.of(setup)
        servers = self.start_servers(setup)
        if servers is None:
            return HttpEngine(self, rules, FolderSync(self, setup))
        try:
            return HttpEngine(
                self,
                rules,
                FolderSync(self, setup),
                addresses=self.addresses_of(servers),
                failure=lambda: servers.failure,
                closed=servers.close,
            )
        except BaseException:
            servers.close()
            raise
