"""Export a run's weights and tokenizer as a folder that AutoModelForCausalLM loads."""

from typing import Annotated

from proxima.cli.parameters import Argument


def export_run(
    run: Annotated[str, Argument("run folder")],
    out: Annotated[str, Argument("folder to create")],
    *,
    checkpoint: Annotated[str, Argument("last, best, or a step (default: last)")] = "last",
    to_hub: Annotated[
        str | None, Argument("also push the folder to the Hugging Face hub; HF_TOKEN", "ORG/NAME")
    ] = None,
    private: Annotated[bool, Argument("with --to-hub: a new repository is private")] = False,
    critic: Annotated[bool, Argument("the critic, for AutoModelForSequenceClassification", exclusive="part")] = False,
    adapter: Annotated[bool, Argument("of a run with LoRA the adapter alone, for peft", exclusive="part")] = False,
) -> None:
    """Export a checkpoint to a folder, and push the folder to the hub if `to_hub` names a repository.

    Raises:
        UserError: the run has no such checkpoint or part, or the name is not valid on the hub.
    """
    from proxima.data import UserError
    from proxima.model.quiet import quiet_transformers
    from proxima.runtime.state.export import check_hub_name, export, push_to_hub

    if private and to_hub is None:
        raise UserError("--private needs a repository on the hub", remedy="name it with --to-hub ORG/NAME")
    if to_hub is not None:
        check_hub_name(to_hub)
    with quiet_transformers():
        folder = export(run, out, which=checkpoint, adapter=adapter, critic=critic)
    print(f"wrote {folder}", flush=True)
    if to_hub is not None:
        print(f"pushed to {push_to_hub(folder, to_hub, private=private)}")


COMMAND = export_run
