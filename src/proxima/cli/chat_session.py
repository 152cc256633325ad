"""Chat with a model or a run's checkpoint, in the model's chat template. The answer appears as it is sampled.

Ctrl-C ends an answer, Ctrl-D the chat; a line with /new begins a new one. Input that is no terminal is one message a
line."""

import sys
from typing import Annotated

from proxima.cli.generate import MODEL, Inference, model_and_data, warn
from proxima.cli.parameters import Argument
from proxima.data import UserError

NEW = "/new"
DEFAULTS = Inference(max_tokens=512)


def chat(model: Annotated[str, Argument(MODEL)], *, inference: Inference = DEFAULTS) -> None:
    """Answer standard input, message by message, until it ends.

    Raises:
        UserError: the model or an option is wrong.
    """
    sampling = inference.sampling
    model, data = model_and_data(model, inference)

    from proxima.runtime.launch.inference import ChatSession, local_engine
    from proxima.view.formatting import visible, write_safely

    tokenizer, engine = local_engine(model, inference.dtype, inference.device, warn)
    conversation = ChatSession(
        tokenizer, engine, sampling, seed=inference.seed, system=data.system, template_arguments=data.template_arguments
    )
    asked = sys.stdin.isatty()  # a person, who sees a prompt
    if asked:
        print(f"{model}: Ctrl-D ends the chat, Ctrl-C an answer, {NEW} begins a new chat", file=sys.stderr)
    while (line := _line(asked)) is not None:
        if line == NEW:
            conversation.messages.clear()
        elif line:
            try:
                whole = conversation.answer(line, lambda piece: write_safely(sys.stdout, visible(piece)))
                print(flush=True)
                if not whole:
                    print(f"(cut off at --max-tokens {sampling.max_tokens})", file=sys.stderr)
            except KeyboardInterrupt:
                print(" …", flush=True)
            except UserError as error:
                print(f"error: {visible(str(error))}; {NEW} begins a new chat", file=sys.stderr)


def _line(asked: bool) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input("> " if asked else "").strip()
    except EOFError:
        if asked:
            print()
        return None


COMMAND = chat
