"""Export a run's weights and tokenizer as a folder that AutoModelForCausalLM loads."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("out", help="folder to create")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step (default: last)")
    parser.add_argument("--to-hub", metavar="ORG/NAME", help="also push the folder to the Hugging Face hub; HF_TOKEN")
    parser.add_argument("--private", action="store_true", help="with --to-hub: a new repository is private")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--critic", action="store_true", help="the critic, for AutoModelForSequenceClassification")
    part.add_argument("--adapter", action="store_true", help="of a run with LoRA the adapter alone, for peft")


def run(arguments: argparse.Namespace) -> int:
    from proxima.data import UserError
    from proxima.runtime.state.export import check_hub_name, export, push_to_hub
    from proxima.runtime.watch.interrupt import quiet_transformers

    part = {"adapter": arguments.adapter, "critic": arguments.critic}
    if arguments.private and arguments.to_hub is None:
        raise UserError("--private is about a repository on the hub", remedy="name it with --to-hub ORG/NAME")
    if arguments.to_hub is not None:
        check_hub_name(arguments.to_hub)
    with quiet_transformers():
        folder = export(arguments.run, arguments.out, which=arguments.checkpoint, **part)
    print(f"wrote {folder}", flush=True)
    if arguments.to_hub is not None:
        print(f"pushed to {push_to_hub(folder, arguments.to_hub, private=arguments.private)}")
    return 0
