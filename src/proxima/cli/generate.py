"""Complete prompts with a model or a run's checkpoint, through the local engine and the model's chat template."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def sampling_of(arguments: argparse.Namespace) -> "Sampling":
    """The sampling that the arguments ask for; a FieldError names the option as the user wrote it."""
    from proxima.engine.protocol import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    try:
        return Sampling(stop=tuple(arguments.stop), **{name: getattr(arguments, name) for name in names})
    except FieldError as error:
        error.field = f"--{error.field.replace('_', '-')}"
        raise


def run(arguments: argparse.Namespace) -> int:
    sampling = sampling_of(arguments)
    if arguments.samples < 1:
        raise UserError(f"--samples={arguments.samples} must be >= 1")
    prompts = _prompts(arguments.prompt)
    model, data = model_and_data(arguments)

    from proxima.runtime.launch.inference import generate

    where: Any = {"seed": arguments.seed, "dtype": arguments.dtype, "device": arguments.device}
    chat: Any = {"system": data.system, "template_arguments": data.template_arguments}
    where["warn"] = lambda note: print(f"warning: {note}", file=sys.stderr)
    completions, seconds = generate(model, prompts, sampling=sampling, samples=arguments.samples, **chat, **where)
    tokens = sum(len(completion.tokens) for completion in completions)
    rate = tokens / seconds if seconds else 0.0
    if arguments.json:
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


def model_and_data(arguments: argparse.Namespace) -> tuple[str, "DataConfig"]:
    """The model's path; of a run, its checkpoint's. The system prompt and the template arguments are those given, and
    else the run's own."""
    from proxima.config import resolve
    from proxima.config.problems import one_problem
    from proxima.config.schema import PromptConfig
    from proxima.config.sections.model_section import model_problem
    from proxima.model.demo_model import download_demo_model, is_downloadable

    model, given = arguments.model, [f"data.template_arguments.{pair}" for pair in arguments.template_argument]
    if arguments.system is not None:
        given.append(f"data.system={json.dumps(arguments.system, ensure_ascii=False)}")
    if (Path(model) / "config.yaml").is_file():
        from proxima.runtime.state.export import find_checkpoint

        data = resolve(model, given, root=PromptConfig).config.data
        return str(find_checkpoint(model, arguments.checkpoint).model), data
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
