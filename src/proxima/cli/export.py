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
    return export_run(
        arguments.run,
        arguments.out,
        checkpoint=arguments.checkpoint,
        hub_name=arguments.to_hub,
        private=arguments.private,
        critic=arguments.critic,
        adapter=arguments.adapter,
    )


def export_run(
    run_folder: str,
    out: str,
    *,
    checkpoint: str = "last",
    hub_name: str | None = None,
    private: bool = False,
    critic: bool = False,
    adapter: bool = False,
) -> int:
    """Export a checkpoint to a folder, and push that to the hub if it is given a name there.

    Args:
        critic, adapter: that part alone.

    Raises:
        UserError: the run has no such checkpoint or part, or the name can't be one of the hub.
    """
    from proxima.data import UserError
    from proxima.runtime.state.export import check_hub_name, export, push_to_hub
    from proxima.runtime.watch.interrupt import quiet_transformers

    if private and hub_name is None:
        raise UserError("--private is about a repository on the hub", remedy="name it with --to-hub ORG/NAME")
    if hub_name is not None:
        check_hub_name(hub_name)
    with quiet_transformers():
        folder = export(run_folder, out, which=checkpoint, adapter=adapter, critic=critic)
    print(f"wrote {folder}", flush=True)
    if hub_name is not None:
        print(f"pushed to {push_to_hub(folder, hub_name, private=private)}")
    return 0
