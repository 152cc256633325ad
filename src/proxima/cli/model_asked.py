"""The options of `proxima generate` and `proxima generate --chat`, and the model that they name."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.cli.parameters import Argument
from proxima.data import FieldError

if TYPE_CHECKING:
    from proxima.api.episode_chat import Table
    from proxima.config.schema import PlayedConfig
    from proxima.config.sections.data_section import DataConfig
    from proxima.engine.protocol import Sampling

TEMPLATE_ARGUMENT = "argument of the chat template: enable_thinking=false; repeatable; overrides the run's own"
TOP_P = "keep the most probable tokens up to this mass"
MIN_P = "keep tokens with at least this share of the largest probability"
MAX_LENGTH = "tokens of prompt and completion together; default: the run's own, or the model's limit"
MAX_TOKENS = "maximum number of new tokens (default: 256, in chat 512; of each turn, with tools, as in the training)"
TOOLS = "functions that the model may call, module:function, with commas between them; default: those of the run"
ENVIRONMENT = "module:Class, a kind such as calculator, or {kind: …}; default: that of the run"
SAMPLING, WORLD = "sampling", "tools and environment"  # titles of options in `--help`


@dataclass(frozen=True, kw_only=True)
class Inference:
    """The options for answering a person's prompts."""

    checkpoint: Annotated[str, Argument("of a run: last, best, or a step (default: last)")] = "last"
    system: Annotated[str | None, Argument("system prompt; default: the run's own (data.system)")] = None
    template_argument: Annotated[Sequence[str], Argument(TEMPLATE_ARGUMENT, "NAME=VALUE", words="append")] = ()
    seed: Annotated[int, Argument("seed of the samples")] = 0
    dtype: Annotated[Literal["bfloat16", "float32"], Argument("dtype of the engine's matrix products and cache")] = (
        "bfloat16"
    )
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto"
    max_length: Annotated[int | None, Argument(MAX_LENGTH)] = None
    temperature: Annotated[float, Argument("0 is greedy (default)", group=SAMPLING)] = 0.0
    top_k: Annotated[int, Argument("keep the k most probable tokens; 0: all", group=SAMPLING)] = 0
    top_p: Annotated[float, Argument(TOP_P, group=SAMPLING)] = 1.0
    min_p: Annotated[float, Argument(MIN_P, group=SAMPLING)] = 0.0
    max_tokens: Annotated[int | None, Argument(MAX_TOKENS, group=SAMPLING)] = None
    stop: Annotated[
        Sequence[str], Argument("text that ends a completion; repeatable", "TEXT", words="append", group=SAMPLING)
    ] = ()
    tools: Annotated[str | None, Argument(TOOLS, group=WORLD)] = None
    environment: Annotated[str | None, Argument(ENVIRONMENT, group=WORLD)] = None

    def sampling(self, max_tokens: int, played: "PlayedConfig | None" = None) -> "Sampling":
        """The sampling options; defaults: `max_tokens` or, if episodes are played, the run's limit and stop texts.

        Raises:
            FieldError: names the option as the user wrote it.
        """
        from proxima.engine.protocol import Sampling

        usual = Sampling(max_tokens=max_tokens) if played is None else played.sampling
        try:
            return Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                max_tokens=usual.max_tokens if self.max_tokens is None else self.max_tokens,
                stop=tuple(self.stop or usual.stop),
            )
        except FieldError as error:
            error.field = f"--{error.field.replace('_', '-')}"
            raise


def warn(note: str) -> None:
    print(f"warning: {note}", file=sys.stderr)


@dataclass(frozen=True)
class ModelAsked:
    """The model that answers the user's prompts.

    Args:
        path: the path of the weights; for a run, of its checkpoint.
        data: system prompt and template arguments: those given, else the run's own.
        max_length: tokens of prompt and completion together; None: the model's own limit.
        played: the config of the episodes, if there are tools or an environment; None: the model answers once.
    """

    path: str
    data: "DataConfig"
    max_length: int | None = None
    played: "PlayedConfig | None" = None
    locating: Callable[[], AbstractContextManager[None]] = nullcontext


def model_asked(model: str, inference: Inference) -> ModelAsked:
    """Find the model that the command line names.

    Raises:
        UserError: the model does not exist, or an option is wrong.
    """
    from proxima.config.problems import one_problem
    from proxima.config.resolution import resolve
    from proxima.config.schema import PlayedConfig, PromptConfig
    from proxima.config.sections.model_section import model_problem, refuse_checkpoint
    from proxima.config.validate import fetch_demo_model

    given = [f"data.template_arguments.{pair}" for pair in inference.template_argument]
    if inference.system is not None:
        given.append(f"data.system={json.dumps(inference.system, ensure_ascii=False)}")
    world = [] if inference.tools is None else [f"task.tools=[{inference.tools}]"]
    world += [] if inference.environment is None else [f"task.environment={inference.environment}"]
    recipe: Any = {}
    plays, longest = bool(world), inference.max_length
    if longest is not None and longest < 2:
        raise FieldError("--max-length", longest, "must be >= 2")
    if (Path(model) / "config.yaml").is_file():
        from proxima.config.recipe_reader import read_yaml
        from proxima.runtime.state.run_checkpoints import find_checkpoint

        recipe, path = model, str(find_checkpoint(model, inference.checkpoint).model)
        stored = read_yaml(Path(model) / "config.yaml").to_python()
        plays = plays or _plays(stored)
        longest = longest or (stored.get("model") or {}).get("max_length")
    else:
        if remedy := model_problem(model):
            raise one_problem("model", f"{remedy}; or the folder of a run", model, "command line")
        refuse_checkpoint(model, inference.checkpoint)
        fetch_demo_model(model)
        path = model
        # rows are read only by an environment of the command line, which needs only their numbers
        world += ["task.kind=seeds", "task.count=1000000"] if inference.environment else ["task.kind=arithmetic"]
    if not plays:
        return ModelAsked(path, resolve(recipe, given, root=PromptConfig).config.data, longest)
    place = [f"model.path={json.dumps(path, ensure_ascii=False)}", "model.lora=null"]
    resolved = resolve(recipe, [*given, *world, *place], root=PlayedConfig)
    return ModelAsked(path, resolved.config.data, longest, resolved.config, resolved.locating)


def _plays(config: Mapping[str, Any]) -> bool:
    """True if the task of a run's config has an environment or tools."""
    task = config.get("task")
    return isinstance(task, dict) and bool(task.get("environment") or task.get("tools"))


@contextmanager
def open_table(asked: ModelAsked) -> "Iterator[Table | None]":
    """The player of the episodes of a model with tools or an environment, created before its weights load; otherwise
    None."""
    if asked.played is None:
        yield None
        return
    from proxima.api.episode_chat import make_table

    with asked.locating():
        table = make_table(asked.played)
    if table is None:
        warn("the run's agent plays by itself and has no part here")
        yield None
        return
    with closing(table.world):
        for note in table.notes:
            warn(note)
        table.require_question()
        yield table
