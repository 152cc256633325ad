"""Chat with a model or a run's checkpoint, in the model's chat template. The answer appears as it is sampled.

Ctrl-C ends an answer, Ctrl-D the chat; a line with /new begins a new one. Input that is no terminal is one message a
line."""

import argparse
import sys

from proxima.cli.generate import MODEL, Inference, add_generation, model_and_data, warn
from proxima.data import UserError

NEW = "/new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)
    add_generation(parser, max_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    return chat(arguments.model, Inference.of(arguments))


def chat(model: str, how: Inference) -> int:
    """Answer standard input, message by message, until it ends.

    Raises:
        UserError: the model or an option is wrong.
    """
    model, data = model_and_data(model, how)

    from proxima.runtime.launch.inference import Conversation, local_engine
    from proxima.view.formatting import visible, write_safely

    tokenizer, engine = local_engine(model, how.dtype, how.device, warn)
    conversation = Conversation(
        tokenizer, engine, how.sampling, seed=how.seed, system=data.system, template_arguments=data.template_arguments
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
                    print(f"(cut off at --max-tokens {how.sampling.max_tokens})", file=sys.stderr)
            except KeyboardInterrupt:
                print(" …", flush=True)
            except UserError as error:
                print(f"error: {visible(str(error))}; {NEW} begins a new chat", file=sys.stderr)
    return 0


def _line(asked: bool) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input("> " if asked else "").strip()
    except EOFError:
        if asked:
            print()
        return None
