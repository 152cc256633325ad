"""Complete prompts with a model or a run's checkpoint, or chat with it, through the local engine and the model's chat
template.

In a chat an answer appears as it is sampled. A model that was trained with tools or an environment has them here too:
lines with `call` and `tool` show its calls and their results. Ctrl-C ends an answer, Ctrl-D the chat; a line with /new
begins a new chat, in a fresh environment. If the input is not a terminal, each line is one message."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.chat_session import converse_with
from proxima.cli.model_asked import Inference, ModelAsked, model_asked, open_table, warn
from proxima.cli.output import print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from proxima.api.episode_chat import Table
    from proxima.data.flow import Completion

MOST = 256  # new tokens
MODEL = "hub name, folder, .gguf file, or a run folder"
IMAGE = "image that every prompt shows: where it has <image>, or before its text; repeatable"
DEFAULTS = Inference()


def complete_prompts(
    model: Annotated[str, Argument(MODEL)],
    prompt: Annotated[
        Sequence[str], Argument("user message; - reads one prompt per line from standard input", words="*")
    ] = (),
    *,
    samples: Annotated[int, Argument("completions per prompt")] = 1,
    image: Annotated[Sequence[str], Argument(IMAGE, "FILE", words="append")] = (),
    as_json: Annotated[bool, Argument("print tokens with their log-probs, for programs", flag="--json")] = False,
    chat: Annotated[bool, Argument("answer messages as they are typed, until Ctrl-D")] = False,
    inference: Inference = DEFAULTS,
) -> int:
    """Print the completions of prompts, or chat; with tools or an environment, play whole episodes. Returns 1 if an
    episode failed.

    Raises:
        UserError: the model, a prompt or an option is wrong.
    """
    inference.sampling(MOST)  # validates the options before anything is read
    if chat:
        if prompt or samples != 1 or as_json or image:
            raise UserError("--chat reads standard input", remedy="leave out prompts, --samples, --image and --json")
        converse_with(model, inference)
        return 0
    if not prompt:
        raise UserError("no prompt is given", remedy="write one, - for standard input, or --chat")
    if samples < 1:
        raise UserError(f"--samples={samples} must be >= 1")
    prompts = _prompts(prompt)
    shown = _images(image)
    asked = model_asked(model, inference)
    if shown and asked.played is not None:
        raise UserError("--image can't be shown to a model with tools or an environment", remedy="leave it out")
    from proxima.model.chat.template import fixed_clock

    with fixed_clock(asked.data.template_date), open_table(asked) as table:
        completions, seconds = _completed(asked, table, prompts, samples, inference, shown)
    tokens = sum(int(path.tokens.size if path.sampled is None else path.sampled.sum()) for path in _paths(completions))
    rate = tokens / seconds if seconds else 0.0
    if as_json:
        facts = {"model": asked.path, "seconds": seconds, "tokens": tokens, "tokens_per_second": rate}
        print_json({**facts, "completions": [_as_json(prompts[c.prompt_uid], c) for c in _paths(completions)]})
    else:
        print("\n".join(_text(prompts, completions)))
        print(f"{tokens} tokens in {seconds:.1f} s, {rate:,.0f} tok/s", file=sys.stderr)
    return 1 if any(c.episode is not None and c.episode.failure for c in completions) else 0


def _completed(
    asked: "ModelAsked",
    table: "Table | None",
    prompts: Sequence[str],
    samples: int,
    inference: Inference,
    images: "Sequence[Image]",
) -> "tuple[list[Completion], float]":
    """Generate the answers, or whole episodes; return them and the seconds that they took."""
    from proxima.api.local_answers import generate, local_engine
    from proxima.runtime.watch.clock import Clock

    sampling, data, clock = inference.sampling(MOST, asked.played), asked.data, Clock()
    how: dict[str, Any] = {"sampling": sampling, "samples": samples, "seed": inference.seed}
    place: dict[str, Any] = {"max_length": asked.max_length, "images": bool(images), "stop": sampling.stop}
    tokenizer, engine = local_engine(asked.path, inference.dtype, inference.device, warn, **place)
    began = clock.now()
    if table is None:
        how |= {"system": data.system, "template_arguments": data.template_arguments, "images": images}
        return generate(tokenizer, engine, prompts, **how), clock.now() - began
    from proxima.api.episode_chat import play_episodes

    return play_episodes(table, engine, prompts, **how), clock.now() - began


def _images(files: Sequence[str]) -> "list[Image]":
    if not files:
        return []
    from proxima.task.image_files import open_image

    return [open_image(file) for file in files]


def _paths(completions: "Sequence[Completion]") -> "list[Completion]":
    return [path for completion in completions for path in completion.paths]


def _prompts(words: Sequence[str]) -> list[str]:
    if list(words) != ["-"]:
        return list(words)
    lines = [line.rstrip("\n") for line in sys.stdin]
    if not lines:
        raise UserError("prompt=- reads prompts from standard input, one a line; the input was empty")
    return lines


def _text(prompts: Sequence[str], completions: Sequence["Completion"]) -> list[str]:
    """The lines to print: the text alone for one completion, else each text with its prompt; or whole episodes."""
    from proxima.view.formatting import printable, visible

    if any(completion.episode is not None for completion in completions):
        from proxima.view.episode_lines import episode_lines

        episodes = ("\n".join(episode_lines(prompts[c.prompt_uid], c)) for c in completions)
        return "\n\n".join(episodes).split("\n")
    if len(completions) == 1:  # a terminal would obey escape sequences; a file or a pipe gets the text unchanged
        return [visible(completions[0].text) if sys.stdout.isatty() else completions[0].text]
    return [f"{printable(prompts[c.prompt_uid])}  →  {printable(c.text)}" for c in completions]


def _as_json(prompt: str, completion: "Completion") -> dict[str, Any]:
    scalars = ("sample", "text", "finish_reason", "temperature")
    columns = ("tokens", "sampled_log_prob", "untruncated_log_prob")
    facts = {name: getattr(completion, name) for name in scalars}
    facts |= {name: getattr(completion, name).tolist() for name in columns}
    if completion.episode is not None and completion.sampled is not None:  # a path of it
        facts |= {
            "turn": completion.turn,
            "sampled": completion.sampled.tolist(),
            "episode": asdict(completion.episode),
        }
    return {"prompt": prompt, **facts}


COMMAND = complete_prompts
