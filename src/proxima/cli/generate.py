"""Complete prompts with a model or a run's checkpoint, or chat with it, through the local engine and the model's chat
template.

In a chat an answer appears as it is sampled. A model that was trained with tools or an environment has them here too:
lines with `call` and `tool` show its calls and their results. Ctrl-C ends an answer, Ctrl-D the chat; a line with /new
begins a new chat, in a fresh environment. If the input is not a terminal, each line is one message."""

from collections.abc import Sequence
from typing import Annotated

from proxima.cli.parameters import Argument, Inference
from proxima.data import UserError

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
    from proxima.cli import chat_session

    chat_session.inference_sampling(inference, chat_session.MOST)  # validates the options before anything is read
    if chat:
        if prompt or samples != 1 or as_json or image:
            raise UserError("--chat reads standard input", remedy="leave out prompts, --samples, --image and --json")
        chat_session.converse_with(model, inference)
        return 0
    if not prompt:
        raise UserError("no prompt is given", remedy="write one, - for standard input, or --chat")
    if samples < 1:
        raise UserError(f"--samples={samples} must be >= 1")
    return chat_session.complete(model, prompt, inference, samples=samples, images=image, as_json=as_json)


COMMAND = complete_prompts
