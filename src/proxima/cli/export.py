"""Export a run's weights and tokenizer as a folder that AutoModelForCausalLM loads."""

from typing import Annotated

from proxima.cli.parameters import Argument


def export_run(
    run: Annotated[str, Argument("run folder")],
    out: Annotated[str, Argument("folder to create")],
    *,
    checkpoint: Annotated[str, Argument("last, best, or a step (default: last)")] = "last",
    critic: Annotated[bool, Argument("the critic, for AutoModelForSequenceClassification", exclusive="part")] = False,
    adapter: Annotated[bool, Argument("of a run with LoRA the adapter alone, for peft", exclusive="part")] = False,
) -> None:
    """Export a checkpoint to a folder.

    Raises:
        UserError: the run has no such checkpoint or part.
    """
    from proxima.runtime.state.run_checkpoints import export

    folder = export(run, out, which=checkpoint, adapter=adapter, critic=critic, say=print)
    print(f"wrote {folder}")


COMMAND = export_run
