"""Complete prompts with a model or a run's checkpoint, through the local engine and the model's chat template."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.cli.output import print_json
from proxima.cli.parameters import Argument
from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.config.sections.data_section import DataConfig
    from proxima.data import Completion
    from proxima.engine.protocol import Sampling

MODEL = "hub name, folder, .gguf file, or a run folder"
TEMPLATE_ARGUMENT = "argument of the chat template: enable_thinking=false; repeatable; overrides the run's own"
TOP_P = "keep the most probable tokens up to this mass"
MIN_P = "keep tokens with at least this share of the largest probability"
MAX_TOKENS = "maximum number of new tokens (default: %(default)s)"
SAMPLING = "sampling"  # the title of its options in `--help`


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How a person's prompts are answered: the options of `generate` and `chat`."""

    checkpoint: Annotated[str, Argument("of a run: last, best, or a step (default: last)")] = "last"
    system: Annotated[str | None, Argument("system prompt; default: the run's own (data.system)")] = None
    template_argument: Annotated[Sequence[str], Argument(TEMPLATE_ARGUMENT, "NAME=VALUE", words="append")] = ()
    seed: Annotated[int, Argument("seed of the samples")] = 0
    dtype: Annotated[Literal["bfloat16", "float32"], Argument("dtype of the engine's matrix products and cache")] = (
        "bfloat16"
    )
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto"
    temperature: Annotated[float, Argument("0 is greedy (default)", group=SAMPLING)] = 0.0
    top_k: Annotated[int, Argument("keep the k most probable tokens; 0: all", group=SAMPLING)] = 0
    top_p: Annotated[float, Argument(TOP_P, group=SAMPLING)] = 1.0
    min_p: Annotated[float, Argument(MIN_P, group=SAMPLING)] = 0.0
    max_tokens: Annotated[int, Argument(MAX_TOKENS, group=SAMPLING)] = 256
    stop: Annotated[
        Sequence[str], Argument("text that ends a completion; repeatable", "TEXT", words="append", group=SAMPLING)
    ] = ()

    @property
    def sampling(self) -> "Sampling":
        """Raises FieldError, which names the option as the user wrote it."""
        from proxima.engine.protocol import Sampling

        try:
            return Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                max_tokens=self.max_tokens,
                stop=tuple(self.stop),
            )
        except FieldError as error:
            error.field = f"--{error.field.replace('_', '-')}"
            raise


def warn(note: str) -> None:
    print(f"warning: {note}", file=sys.stderr)


def complete_prompts(
    model: Annotated[str, Argument(MODEL)],
    prompt: Annotated[
        Sequence[str], Argument("user message; - reads one prompt per line from standard input", words="+")
    ],
    *,
    samples: Annotated[int, Argument("completions per prompt")] = 1,
    as_json: Annotated[bool, Argument("print tokens with their log-probs, for programs", flag="--json")] = False,
    inference: Inference = Inference(),
) -> None:
    """Print the completions of prompts.

    Raises:
        UserError: the model, a prompt or an option is wrong.
    """
    sampling = inference.sampling
    if samples < 1:
        raise UserError(f"--samples={samples} must be >= 1")
    prompts = _prompts(prompt)
    model, data = model_and_data(model, inference)

    from proxima.runtime.launch.inference import generate

    completions, seconds = generate(
        model,
        prompts,
        sampling=sampling,
        samples=samples,
        system=data.system,
        template_arguments=data.template_arguments,
        seed=inference.seed,
        dtype=inference.dtype,
        device=inference.device,
        warn=warn,
    )
    tokens = sum(len(completion.tokens) for completion in completions)
    rate = tokens / seconds if seconds else 0.0
    if as_json:
        facts = {"model": model, "seconds": seconds, "tokens": tokens, "tokens_per_second": rate}
        print_json({**facts, "completions": [_as_json(prompts[c.prompt_uid], c) for c in completions]})
    else:
        print("\n".join(_text(prompts, completions)))
        print(f"{tokens} tokens in {seconds:.1f} s, {rate:,.0f} tok/s", file=sys.stderr)


def _prompts(words: Sequence[str]) -> list[str]:
    if list(words) != ["-"]:
        return list(words)
    lines = [line.rstrip("\n") for line in sys.stdin]
    if not lines:
        raise UserError("prompt=- reads prompts from standard input, one a line; the input was empty")
    return lines


def model_and_data(model: str, inference: Inference) -> tuple[str, "DataConfig"]:
    """The model's path; of a run, its checkpoint's. The system prompt and the template arguments are those given, and
    else the run's own."""
    from proxima.config import resolve
    from proxima.config.problems import one_problem
    from proxima.config.schema import PromptConfig
    from proxima.config.sections.model_section import model_problem
    from proxima.model.demo_model import download_demo_model
    from proxima.model.demo_path import is_downloadable

    given = [f"data.template_arguments.{pair}" for pair in inference.template_argument]
    if inference.system is not None:
        given.append(f"data.system={json.dumps(inference.system, ensure_ascii=False)}")
    if (Path(model) / "config.yaml").is_file():
        from proxima.runtime.state.export import find_checkpoint

        data = resolve(model, given, root=PromptConfig).config.data
        return str(find_checkpoint(model, inference.checkpoint).model), data
    if remedy := model_problem(model):
        raise one_problem("model", remedy, model, "command line")
    if is_downloadable(model):
        download_demo_model()
    return model, resolve({}, given, root=PromptConfig).config.data


def _text(prompts: Sequence[str], completions: Sequence["Completion"]) -> list[str]:
    """The texts alone for one completion; with the prompts before them for several."""
    from proxima.view.formatting import printable, visible

    if len(completions) == 1:  # a terminal would obey escape sequences; a file or a pipe gets the text as it is
        return [visible(completions[0].text) if sys.stdout.isatty() else completions[0].text]
    return [f"{printable(prompts[c.prompt_uid])}  →  {printable(c.text)}" for c in completions]


def _as_json(prompt: str, completion: "Completion") -> dict[str, Any]:
    scalars = ("sample", "text", "finish_reason", "temperature")
    columns = ("tokens", "sampled_log_prob", "untruncated_log_prob")
    facts = {name: getattr(completion, name) for name in scalars}
    return {"prompt": prompt, **facts, **{name: getattr(completion, name).tolist() for name in columns}}


COMMAND = complete_prompts
