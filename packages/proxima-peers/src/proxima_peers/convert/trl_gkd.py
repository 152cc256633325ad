"""TRL's GKDTrainer: a recipe of `proxima train` that trains only by a teacher."""

from proxima_peers.convert import common, trackers
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.trl import adamw, adapted_model, clip_and_save, evaluation_strategy, rows_of_update, warmups

DISTILLATION = "algorithm.distillation"
TEACHER = "teacher_model_name_or_path"
OF_SFT = (
    *("packing", "packing_strategy", "eval_packing", "assistant_only_loss", "completion_only_loss"),
    *("dataset_text_field", "loss_type"),
)


def convert_gkd(o: Options) -> Draft:
    """A recipe from the options of `GKDConfig`, with the defaults of 1.16."""
    d = Draft()
    adapted_model(d, o)
    d.put("model.max_length", *o.sourced("max_length", default=1024))
    split = str(o.get("dataset_train_split", default="train"))
    common.task(d, o, "dataset_name", split=split, messages="messages")
    d.needs("task", "rows of `messages` without the last turn, the assistant's, which TRL leaves out of the prompt")
    d.ask("reward.0", "math", "any: rewards are only measured here; see `proxima list reward`", kind=True)
    _teacher(d, o)
    common.sampling(d, o, {"temperature": ("temperature",)}, {"temperature": 0.9})
    d.put("sampling.max_tokens", *o.sourced("max_new_tokens", default=128))
    d.put("train.prompts_per_step", *rows_of_update(o))
    d.put("train.completions_per_prompt", 1, "GKDTrainer generates one")
    d.put("train.updates_per_step", 1, "one generation, one update")
    adamw(d, o, 2e-5)
    most = o.whole("max_steps", default=-1)
    epochs = ("num_train_epochs", "TRL counts num_train_epochs, 3 by default")
    common.steps(d, o, most, o.origin("max_steps"), "", *epochs)
    common.warmup(d, *warmups(o), 1, rounded="up")
    clip_and_save(d, o, 1)
    if evaluation_strategy(o) != "no":
        d.needs("eval.task", "eval_strategy: TRL evaluates the divergence on chats; here a reward judges answers")
        d.drops_given(o, "as eval_strategy", "eval_steps", "eval_on_start", "dataset_test_split")
    d.drops_given(o, "an option of SFT, which GKDTrainer does not read", *OF_SFT)
    trackers.trl(d, o)
    return d


def _teacher(d: Draft, o: Options) -> None:
    """The teacher, the divergence, and the completions that the teacher sees."""
    d.spec("algorithm.advantage", "grpo", "not used: the teacher alone trains", scale=("none", "as in distill"))
    path = o.get(TEACHER, "teacher_model")
    if path is None:
        d.ask(f"{DISTILLATION}.path", "path/to/teacher", f"{TEACHER}: which model teaches")
    else:
        d.put(f"{DISTILLATION}.path", str(path), o.origin(TEACHER, "teacher_model"))
    share = o.number("beta", default=0.5, least=0, most=1)
    kind = {0: "forward_kl", 1: "reverse_kl"}.get(share, "js")
    fields: Fields = {}
    if kind == "js":
        fields = {"beta": (share, o.origin("beta"))}
    note = ""
    if kind != "js":
        note = "TRL's loss at this end is the KL itself, not the limit 0 of its formula (T21)"
    d.spec(f"{DISTILLATION}.divergence", kind, o.origin("beta"), note, **fields)
    whole = "TRL compares the whole vocabulary: its size is the same here, and 16 cheaper and a lower bound"
    d.needs(f"{DISTILLATION}.divergence.top_k", whole)
    d.spec(f"{DISTILLATION}.aggregate", "token_mean", "GKDTrainer's mean over tokens")
    mixed = o.number("lmbda", default=0.5, least=0, most=1)
    if mixed < 1:
        default = "" if o.given("lmbda") else ", TRL's default"
        d.lacks("lmbda", f"{mixed:g}{default}: the share of the student's own answers; here all are its own, lmbda 1")
    if o.flag("seq_kd") and mixed < 1:
        d.lacks("seq_kd", "true: answers of the teacher; generate them first and train on them with a section sft")
    else:
        d.drops_given(o, "off, or never reached", "seq_kd")
    tempered = o.number("temperature", default=0.9)
    if tempered != 1:
        default = "" if o.given("temperature") else ", TRL's default"
        d.lacks("temperature", f"{tempered:g}{default}: TRL samples at it and compares at 1; here both are at it")
