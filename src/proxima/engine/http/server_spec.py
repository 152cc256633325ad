"""The spec that all engines over HTTP derive from."""

from dataclasses import dataclass

from proxima.data.errors import within
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.folder_sync import FolderSync
from proxima.engine.http.generation_job import CompletionRules
from proxima.engine.http.server_checks import check_servers_of
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import EngineRequirements, EngineSetup
from proxima.engine.serve.servers import check_serve, start_servers
from proxima.system.atomic_files import check_writable


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ServerSettings):
    """An engine that consists of one or more servers; `ServerSettings` has the fields. Each kind of server defines
    `dialect`."""

    def check(self, needs: EngineRequirements) -> list[str]:
        """See `EngineSpec.check`. Queries servers that are already running; those that proxima starts can only be
        queried once they run, by `HttpEngine.check`."""
        if needs.publishes and self.weight_folder is not None:
            remedy = "give a folder that the trainer can write and the servers can read; null: one in memory"
            check_writable("weight_folder", self.weight_folder, remedy)
        if self.serve is None:
            return check_servers_of(self, needs)
        with within("serve"):
            check_serve(self.dialect().kind, self.serve, model=needs.model.path)
        return []

    def build(self, setup: EngineSetup) -> HttpEngine:
        """Build the engine, once the servers answer.

        Raises:
            FieldError, UserError: they do not answer, or differ from one another or from the model; see
                `start_servers`.
        """
        rules, sync = CompletionRules.of(setup), FolderSync(self, setup)
        if self.serve is None:
            return HttpEngine(self, rules, sync)
        with within("serve"):
            servers = start_servers(
                self.dialect().kind,
                self.serve,
                model=setup.model_path,
                max_length=setup.max_length,
                log=setup.log,
                **self.launch_options,
            )
        return HttpEngine(self, rules, sync, servers)
