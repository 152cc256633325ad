"""An engine of a recipe: its settings in the config, and the requirements of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxima.data import within
from proxima.engine.protocol import Engine, EngineRequirements, EngineSetup, close_engine
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel, UnloadedModel


@dataclass(frozen=True, kw_only=True)
class EngineSelection:
    """An engine before it is built.

    Args:
        spec: an `EngineSpec`, or an object that only has its `build`.
        needs: the requirements of the run.
        path: that of the spec in the config, which prefixes the names of fields in messages.
    """

    spec: Any
    needs: EngineRequirements
    path: str = "engine"

    def check(self) -> list[str]:
        """Run `EngineSpec.check`; a spec that does not derive from `EngineSpec` has none.

        Returns: warnings.

        Raises:
            FieldError, UserError: as `EngineSpec.check`; a field is named by its path in the config.
        """
        return self._checked(self.spec)

    def build(
        self, load_weights: Callable[[], LoadedModel], *, compute: ComputeThread, log: Path | None, seed: int
    ) -> tuple[Engine, list[str]]:
        """Build the engine; the arguments are those of `EngineSetup`.

        Returns: the engine, and the warnings about a server that it started, which could not be checked before.

        Raises:
            FieldError, UserError: as `check`; the server is stopped.
        """
        model = self.needs.model
        setup = EngineSetup(
            model_path=model.path,
            tokenizer=model.tokenizer,
            load_weights=load_weights,
            max_length=model.context,
            compute=compute,
            log=log,
            seed=seed,
            adapter_rank=self.needs.adapter_rank,
            shares_devices=self.needs.sleeps,
        )
        if getattr(self.spec, "serve", None) is None:
            return self.spec.build(setup), []
        with within(self.path):
            engine: Engine = self.spec.build(setup)
        try:
            return engine, self._checked(engine)
        except BaseException:
            close_engine(engine)
            raise

    def _checked(self, checked: Any) -> list[str]:
        """The warnings of an object's `check`, if it has one."""
        if not hasattr(checked, "check"):
            return []
        with within(self.path):
            return [f"{self.path}: {note}" for note in checked.check(self.needs)]


def within_servers(model: UnloadedModel, specs: Mapping[str, Any]) -> tuple[UnloadedModel, list[str]]:
    """The model with a context that the running servers accept, and a note for each engine whose servers accept less
    than the model does.

    Args:
        specs: those of the engines, by their paths in the config. The shortest limit bounds the context.
    """
    notes = list[str]()
    context = model.context
    for path, spec in specs.items():
        if not hasattr(spec, "longest_sequence"):
            continue
        with within(path):
            longest = spec.longest_sequence()
        if longest is not None and longest < model.context:
            context = min(context, longest)
            notes.append(
                f"{path}: the server takes sequences of {longest} tokens, and the model {model.context}: prompt and "
                f"completion have at most {longest} together"
            )
    return replace(model, context=context), notes


def computes_here(spec: Any) -> bool:
    """Return True if an engine of this spec has a copy of the weights in this process (`EngineSpec.needs_weights`);
    False for a spec that does not derive from `EngineSpec`."""
    return bool(getattr(spec, "needs_weights", False))
