"""SkyRL: its launch scripts and YAML, of `skyrl_train` 0.4 and of `skyrl`."""

import math

from proxima_peers.convert import common, multi_turn, trackers
from proxima_peers.convert.adapter import LoraNames
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options
from proxima_peers.convert.rollout_servers import skyrl_engine
from proxima_peers.convert.skyrl_algorithm import algorithm, is_older, overlong_penalty
from proxima_peers.convert.skyrl_critic import critic_of_values
from proxima_peers.convert.verl_sources import mix_of_files
from proxima_peers.convert.verl_training import lora_by_rank

SAMPLING = "generator.sampling_params."
HELD_OUT = "generator.eval_sampling_params."
LONGEST = SAMPLING + "max_generate_length"
OPTIMIZER = "trainer.policy.optimizer_config."
LORA = "trainer.policy.model.lora."
ENV = "environment.env_class"
MULTI_TURN = ("gsm8k_multi_turn", "search", "searchcode", "text2sql")  # environments of SkyRL-Gym that answer


def convert(o: Options) -> Draft:
    """A recipe from SkyRL's options."""
    d = Draft()
    longest = o.whole(LONGEST, default=1024, least=1)
    _model(d, o, longest)
    _data(d, o)
    _reward(d, o)
    overlong_penalty(d, o, longest)
    algorithm(d, o)
    names = {name: (SAMPLING + name,) for name in ("temperature", "top_k", "top_p", "min_p")}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0})
    d.put("sampling.max_tokens", longest, o.origin(LONGEST))
    stop = o.get(SAMPLING + "stop")
    if stop:
        stops = stop if isinstance(stop, list) else [str(stop)]
        d.put("sampling.stop", stops, o.origin(SAMPLING + "stop"))
    _temperature_of_the_loss(d, o)
    _batch(d, o)
    _asynchrony(d, o)
    _training(d, o)
    critic_of_values(d, o)
    skyrl_engine(d, o)
    _evaluation(d, o, longest)
    _turns(d, o, longest)
    trackers.skyrl(d, o)
    return d


def _model(d: Draft, o: Options, longest: int) -> None:
    """The policy, its adapter, and the context of prompt and completion."""
    common.model(d, o, "trainer.policy.model.path")
    names = ("generator.max_input_length", "trainer.max_prompt_length")
    prompt = o.whole(*names, default=512, least=1)
    d.put("model.max_length", prompt + longest, f"{o.origin(*names)} + max_generate_length")
    d.put("data.over_length", "skip", "SkyRL leaves out longer prompts")
    o.given(names[1])
    if o.given("trainer.bf16"):
        computed = "bfloat16" if o.flag("trainer.bf16", default=True) else "float32"
        d.put("model.compute_dtype", computed, o.origin("trainer.bf16"))
    d.flag("model.gradient_checkpointing", o, "trainer.gradient_checkpointing")
    rank, alpha, targets, dropout = (LORA + name for name in ("rank", "alpha", "target_modules", "dropout"))
    own = LoraNames(rank=rank, alpha=alpha, targets=targets, dropout=dropout, default_alpha=16)
    if not lora_by_rank(d, o, own):
        d.drops_given(o, "lora.rank is 0: off", dropout)


def _data(d: Draft, o: Options) -> None:
    """The files of `train_data`: Parquet, JSON, or `name:split` of a data set on the hub."""
    name = "data.train_data"
    common.task(d, o, name, **_columns(o))
    _split_of_hub(d, "task")
    mix_of_files(d, o, name, "task", "train", _columns(o), SEVERAL)
    d.put("data.shuffle", True, "SkyRL shuffles the rows of an epoch")
    o.given("generator.chat_template_kwargs")
    common.template_arguments(d, o, "generator.chat_template_kwargs")


SEVERAL = "SkyRL reads them as one data set; a row names its env_class."


def _columns(o: Options) -> dict[str, str]:
    """The columns of a row; its environment reads the answer."""
    if o.get(ENV, default="gsm8k") == "aime":
        answer = "reward_model"
    else:
        answer = "reward_spec"
    return {"messages": "prompt", "answer": f"{answer}.ground_truth"}


def _split_of_hub(d: Draft, path: str) -> None:
    """`name:split` of a data set on the hub, in two fields."""
    place = f"{path}.path"
    entry = d.entries.get(place)
    if entry is None or d.entries[f"{path}.kind"].value != "dataset" or not isinstance(entry.value, str):
        return
    data, colon, split = entry.value.partition(":")
    d.put(place, data, entry.origin, entry.note)
    if colon:
        d.put(f"{path}.split", split, entry.origin)
    elif path == "eval.task":
        d.put(f"{path}.split", "train", "SkyRL takes the split train of a data set without a named one")


def _reward(d: Draft, o: Options) -> None:
    """The environment, which scores: `gsm8k`; any other is to fill in. A row's own `env_class` comes first in SkyRL."""
    named = str(o.get(ENV, default="gsm8k"))
    origin = o.origin(ENV)
    if "task.tasks.0.name" in d.entries:  # a mix, whose sources have their own
        d.drops_given(o, "each row names its own env_class; the sources of the mix have their rewards", ENV)
    elif ENV in o.flat and o.flat[ENV] is None:
        d.ask("reward.0", "math", f"{ENV} is null: each row names its own; {PORT}", kind=True)
    elif named == "gsm8k":
        note = "SkyRL's needs the answer after ####; a row with an env_class of its own has that scorer there"
        kind = "gsm8k" if d.entries["task.kind"].value == "gsm8k" else "number"
        d.append("reward", kind, origin, note)
    elif named == "aime":
        scores = "SkyRL gives +1 and -1: {kind: math, weight: 2} is as far apart"
        d.ask("reward.0", "math", f"{ENV}: aime: choose `reward`; {scores}", kind=True)
    else:
        d.ask("reward.0", "math", f"{ENV}: {named}: {PORT}", kind=True)
    name = "generator.zero_reward_on_non_stop"
    if o.flag(name):
        d.lacks(name, "a cut completion keeps its score here; selection drop_truncated and reward missing_eos are near")


PORT = (
    "a scorer of yours, {kind: function, path: ./FILE.py:FUNCTION}, or play it: environment {kind: skyrl_gym, env: …} "
    "of proxima-worlds, reward {kind: environment}"
)


def _turns(d: Draft, o: Options, longest: int) -> None:
    """`max_turns`, and the environment that answers between them."""
    name = "generator.max_turns"
    named = str(o.get(ENV, default="gsm8k"))
    most = o.whole(name, default=1, least=1)
    if most == 1:
        d.drops_given(o, "off, or neutral", name)
        if named in MULTI_TURN and o.given(ENV):
            d.drops(name, f"1: {named} answers no message")
        return
    d.put("episode.turns", most, o.origin(name))
    names = ("generator.max_input_length", "trainer.max_prompt_length")
    whole = o.whole(*names, default=512, least=1) + longest
    note = "SkyRL ends an episode whose messages are longer than max_input_length; here prompt and answers count, too"
    d.put("episode.tokens", whole, f"{o.origin(*names)} + max_generate_length", note)
    d.put("episode.forks", "train", "our default", multi_turn.FORKS)
    what = f"{{kind: skyrl_gym, env: {named}}} of proxima-worlds plays it, or a class of yours with tools or `respond`"
    option = ENV if o.given(ENV) else name
    d.wait(multi_turn.WORLD, option, f"{named}: {what}")
    multi_turn.held_out(d)


def _temperature_of_the_loss(d: Draft, o: Options) -> None:
    """`trainer.algorithm.temperature`, by default the sampling's."""
    name = "trainer.algorithm.temperature"
    written = o.number(name)
    if written is None:
        return
    if written == d.entries["sampling.temperature"].value:
        d.drops(name, "the sampling's, as here")
    else:
        d.lacks(name, f"{written:g}, not the sampling's: here the trainer reads the temperature from the data")


def _batch(d: Draft, o: Options) -> None:
    """Prompts, completions, updates: SkyRL counts both batch sizes in prompts."""
    size = "trainer.train_batch_size"
    small = "trainer.policy_mini_batch_size"
    count = "generator.n_samples_per_prompt"
    prompts = o.whole(size, default=1024, least=1)
    mini = o.whole(small, default=256, least=1)
    d.put("train.prompts_per_step", prompts, o.origin(size))
    d.put("train.completions_per_prompt", o.whole(count, default=5, least=1), o.origin(count))
    note = f"{prompts} prompts in mini batches of {mini}: SkyRL counts both in prompts"
    common.updates(d, math.ceil(prompts / mini), o.origin(small), note)
    d.copy("train.epochs_per_step", o, "trainer.update_epochs_per_batch", default=1, whole=True)
    tokens = "trainer.max_tokens_per_microbatch"
    most = o.whole(tokens, default=-1)
    if most > 0:
        d.put("train.tokens_per_micro_batch", most, o.origin(tokens))
    else:
        d.drops_given(o, "-1: off", tokens)


def _asynchrony(d: Draft, o: Options) -> None:
    """`trainer.fully_async`: the bound of the lag, and the prompts that are generated at once."""
    section = "trainer.fully_async."
    bound = section + "max_staleness_steps"
    workers = section + "num_parallel_generation_workers"
    apart = o.given(bound) and not o.flag("trainer.placement.colocate_all", default=True)
    on = o.flag(section + "enabled", default=apart)  # up to 0.4 its own program switched it on, on GPUs of its own
    if not on:
        d.put("runtime.max_lag", 0, o.origin(section + "enabled"), "generation and training take turns")
        d.drops_given(o, "the run is synchronous", bound, workers)
        return
    lag = o.whole(bound, default=4, least=0)
    d.put("runtime.max_lag", lag, o.origin(bound))
    prompts = d.entries["train.prompts_per_step"].value
    at_once = o.whole(workers, default=768, least=1)
    origin = o.origin(workers)
    most = (lag + 1) * prompts
    if at_once > most:
        origin = f"{origin}, {at_once}: no more than (max_lag + 1) x {prompts} are ever admitted"
        at_once = most
    if lag:
        d.put("runtime.max_concurrent_rollouts", at_once, origin)
    sizes = ("trainer.train_batch_size", "trainer.policy_mini_batch_size")
    if d.entries["train.updates_per_step"].value > 1 and not any(size in o.doubts for size in sizes):
        d.lacks(
            "trainer.train_batch_size", "SkyRL's steps are mini batches when fully asynchronous: the sizes are equal"
        )


def _training(d: Draft, o: Options) -> None:
    """Optimizer, schedule, steps, checkpoints."""
    names = {"lr": (OPTIMIZER + "lr",), "weight_decay": (OPTIMIZER + "weight_decay",)}
    common.optimizer(d, o, names, {"lr": 1e-6, "weight_decay": 0.01})
    common.betas(d, o, OPTIMIZER + "adam_betas", "train", [0.9, 0.999])
    common.schedule(d, o, OPTIMIZER + "scheduler", default="constant_with_warmup")
    d.copy("train.max_grad_norm", o, OPTIMIZER + "max_grad_norm", default=1.0)
    steps = "trainer.max_training_steps"
    epochs = "trainer.epochs"
    common.steps(d, o, o.whole(steps), o.origin(steps), "", epochs, "SkyRL counts trainer.epochs, 1 by default")
    updates = (o.whole(OPTIMIZER + "num_warmup_steps", default=0), o.origin(OPTIMIZER + "num_warmup_steps"))
    common.warmup(d, updates, (0.0, ""), d.entries["train.updates_per_step"].value)
    every = "trainer.ckpt_interval"
    keep = "trainer.max_ckpts_to_keep"
    d.put("checkpoint.every", max(0, o.whole(every, default=10)), o.origin(every))
    kept = o.whole(keep, default=-1)
    if kept > 0:
        d.put("checkpoint.keep_last", kept, o.origin(keep))
    else:
        d.drops_given(o, "-1: all are kept", keep)
    d.copy("seed", o, "trainer.seed", default=42, whole=True)


def _evaluation(d: Draft, o: Options, longest: int) -> None:
    """`val_data`, `eval_interval`, and the sampling of held-out questions."""
    every = (max(0, o.whole("trainer.eval_interval", default=5)), o.origin("trainer.eval_interval"))
    before = (o.flag("trainer.eval_before_train", default=True), o.origin("trainer.eval_before_train"))
    names = {name: (HELD_OUT + name,) for name in ("temperature", "top_k", "top_p")}
    names["max_tokens"] = (HELD_OUT + "max_generate_length",)
    names["samples"] = ("generator.eval_n_samples_per_prompt",)
    for spellings in names.values():
        o.given(*spellings)
    if not common.evaluation(d, o, "data.val_data", every, **_columns(o)):
        return
    _split_of_hub(d, "eval.task")
    mix_of_files(d, o, "data.val_data", "eval.task", "test", _columns(o), SEVERAL)
    d.put("eval.before", *before)
    usual = 0.0 if is_older(o) else 1.0
    temperature = o.number(*names["temperature"], default=usual)
    defaults = {"temperature": usual, "top_k": -1, "top_p": 1.0, "max_tokens": longest}
    common.eval_sampling(d, o, names, defaults, greedy=temperature == 0)
