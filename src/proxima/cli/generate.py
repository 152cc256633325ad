"""Complete prompts with a model or a run's checkpoint, through the local engine and the model's chat template."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proxima.cli.output import print_json
from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.config.sections.data_section import DataConfig
    from proxima.data import Completion
    from proxima.engine.protocol import Sampling

MODEL = "hub name, folder, .gguf file, or a run folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help=MODEL)
    add("prompt", nargs="+", help="user message; - reads one prompt per line from standard input")
    add("--samples", type=int, default=1, help="completions per prompt")
    add("--json", action="store_true", help="print tokens with their log-probs, for programs")
    add_generation(parser, max_tokens=256)


def add_generation(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """The arguments of every command whose answers a person reads."""
    add = parser.add_argument
    add("--checkpoint", default="last", help="of a run: last, best, or a step (default: last)")
    add("--system", help="system prompt; default: the run's own (data.system)")
    words = "argument of the chat template: enable_thinking=false; repeatable; overrides the run's own"
    add("--template-argument", action="append", default=[], metavar="NAME=VALUE", help=words)
    add("--seed", type=int, default=0, help="seed of the samples")
    dtype = "dtype of the engine's matrix products and cache"
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=dtype)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="keep the k most probable tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="keep the most probable tokens up to this mass")
    add("--min-p", type=float, default=0.0, help="keep tokens with at least this share of the largest probability")
    add("--max-tokens", type=int, default=max_tokens, help=f"maximum number of new tokens (default: {max_tokens})")
    stop = "text that ends a completion; repeatable"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How a person's prompts are answered: the values of the options of `add_generation`.

    Args:
        system, template_arguments: None and empty: the run's own.
    """

    sampling: "Sampling"
    checkpoint: str = "last"
    system: str | None = None
    template_arguments: Sequence[str] = ()
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "auto"

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Inference":
        """Raises FieldError, which names the option as the user wrote it."""
        from proxima.engine.protocol import Sampling

        names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
        try:
            sampling = Sampling(stop=tuple(arguments.stop), **{name: getattr(arguments, name) for name in names})
        except FieldError as error:
            error.field = f"--{error.field.replace('_', '-')}"
            raise
        return cls(
            sampling=sampling,
            checkpoint=arguments.checkpoint,
            system=arguments.system,
            template_arguments=arguments.template_argument,
            seed=arguments.seed,
            dtype=arguments.dtype,
            device=arguments.device,
        )


def warn(note: str) -> None:
    print(f"warning: {note}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    how = Inference.of(arguments)
    return complete_prompts(arguments.model, arguments.prompt, how, samples=arguments.samples, as_json=arguments.json)


def complete_prompts(
    model: str, words: Sequence[str], how: Inference, *, samples: int = 1, as_json: bool = False
) -> int:
    """Print the completions of prompts.

    Args:
        words: the prompts; `-` alone: those of standard input, one a line.

    Raises:
        UserError: the model, a prompt or an option is wrong.
    """
    if samples < 1:
        raise UserError(f"--samples={samples} must be >= 1")
    prompts = _prompts(words)
    model, data = model_and_data(model, how)

    from proxima.runtime.launch.inference import generate

    completions, seconds = generate(
        model,
        prompts,
        sampling=how.sampling,
        samples=samples,
        system=data.system,
        template_arguments=data.template_arguments,
        seed=how.seed,
        dtype=how.dtype,
        device=how.device,
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
    return 0


def _prompts(words: Sequence[str]) -> list[str]:
    if list(words) != ["-"]:
        return list(words)
    lines = [line.rstrip("\n") for line in sys.stdin]
    if not lines:
        raise UserError("prompt=- reads prompts from standard input, one a line; the input was empty")
    return lines


def model_and_data(model: str, how: Inference) -> tuple[str, "DataConfig"]:
    """The model's path; of a run, its checkpoint's. The system prompt and the template arguments are those given, and
    else the run's own."""
    from proxima.config import resolve
    from proxima.config.problems import one_problem
    from proxima.config.schema import PromptConfig
    from proxima.config.sections.model_section import model_problem
    from proxima.model.demo_model import download_demo_model
    from proxima.model.demo_path import is_downloadable

    given = [f"data.template_arguments.{pair}" for pair in how.template_arguments]
    if how.system is not None:
        given.append(f"data.system={json.dumps(how.system, ensure_ascii=False)}")
    if (Path(model) / "config.yaml").is_file():
        from proxima.runtime.state.export import find_checkpoint

        data = resolve(model, given, root=PromptConfig).config.data
        return str(find_checkpoint(model, how.checkpoint).model), data
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
