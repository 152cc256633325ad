"""Export a run's weights and tokenizer as a folder that AutoModelForCausalLM loads."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("out", help="folder to create")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step (default: last)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--critic", action="store_true", help="the critic, for AutoModelForSequenceClassification")
    part.add_argument("--adapter", action="store_true", help="of a run with LoRA the adapter alone, for peft")


def run(arguments: argparse.Namespace) -> int:
    from proxima.runtime.export import export
    from proxima.runtime.interrupt import quiet_transformers

    part = {"adapter": arguments.adapter, "critic": arguments.critic}
    with quiet_transformers():
        folder = export(arguments.run, arguments.out, which=arguments.checkpoint, **part)
    print(f"wrote {folder}")
    return 0
