"""The specs of the charts in report.html: the metrics of each, the format of a value, and the ends of the axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from proxima.view.formatting import count, duration, fixed, rate, significant

RECENT = 10  # steps of the running acceptance rate
SHARE = (0.0, 1.0)
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Curves:
    """A chart of the report.

    Args:
        keys: keys of metrics.jsonl, with the names of their lines.
        write: formats a value.
        zero: the axis starts at 0.
        ends: ends of the axis, if the values are bounded; values beyond them are drawn at the ends.
        share_if_possible: the axis is 0 … 1 if all values are within it.
        unusual: leave out lines that are always 0.
        held_out: keys of the evaluations, drawn as dots, with the names of the dots.
    """

    title: str
    keys: Mapping[str, str]
    write: Callable[[float | None], str]
    explanation: str
    zero: bool = True
    smooth: bool = True
    ends: tuple[float, float] | None = None
    share_if_possible: bool = False
    unusual: bool = False
    held_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The scale of the values: shares are shown in percent."""
        return 100.0 if isinstance(self.write, InPercent) else 1.0


@dataclass(frozen=True)
class InPercent:
    places: int

    def __call__(self, value: float | None) -> str:
        return f"{fixed(value, self.places)} %"


steady = partial(Curves, smooth=False)  # without a running mean
floating = partial(Curves, zero=False)  # the axis need not start at 0


def tenths(value: float | None) -> str:
    return fixed(value, 1)


def three(value: float | None) -> str:
    return fixed(value, 3)


def training_and_held_out(title: str, key: str, explanation: str, *, zero: bool = True) -> Curves:
    """Return a chart of a metric of both steps and evaluations."""
    return Curves(title, {key: "training"}, three, explanation, zero=zero, held_out={key: HELD_OUT})


ACCURACY = Curves(
    "Accuracy", {"accuracy": "training"}, three, "share of right answers", ends=SHARE, held_out={"accuracy": HELD_OUT}
)
REWARD = replace(
    training_and_held_out("Reward", "reward/mean", "mean over the valid completions of a step", zero=False),
    share_if_possible=True,
)
# The first three charts that a run has are large: what is learned (held-out accuracy, reward), and whether the policy
# is healthy. Entropy shows collapse and divergence in any run; if reward and accuracy are equal, KL is the third.
VITAL = (
    Curves("Entropy", {"entropy/mean": "mean"}, three, "nats per token; at 0 the policy no longer explores"),
    Curves(
        "KL", {"approx_kl": "behavior to current"}, significant, "nats per token: how far an update moved the policy"
    ),
)
CRITIC = (
    Curves(
        "Explained variance",
        {"value/explained_variance": "critic", "value/explained_variance_prompt_mean": "prompt's mean"},
        three,
        "share of the rewards' variance that the critic predicts, and the mean of the prompt's other rewards; below "
        "-1 is drawn at -1",
        ends=(-1.0, 1.0),
    ),
    Curves("Value loss", {"value/loss": "critic"}, significant, "mean over the tokens of the critic's update"),
    floating("Values", {"value/mean": "critic", "returns/mean": "returns"}, three, "means over the tokens"),
)
CURVES = (
    Curves("Masked", {"masked_fraction": "masked"}, InPercent(2), "% of tokens, outside the trust region"),
    Curves("Length", {"length/mean": "mean", "length/max": "longest"}, tenths, "tokens of a completion"),
    Curves(
        "Truncated", {"truncated_fraction": "truncated"}, InPercent(1), "% of completions that reached the length limit"
    ),
    Curves("Gradient norm", {"grad_norm": "before clipping"}, three, "of the whole update"),
    Curves(
        "Engine against trainer", {"mismatch/log_prob_absdiff_mean": "mean |Δ log-prob|"}, significant, "nats per token"
    ),
    steady(
        "Weights at the engine",
        {"sync/probe_mean": "mean |Δ log-prob|", "sync/probe_max": "largest"},
        significant,
        "nats, of the probe's tokens after each hand-over: the engine against the trainer, on the same weights",
    ),
    floating("Loss", {"loss": "surrogate"}, significant, "in policy gradients levels say little; jumps matter"),
    steady("Learning rate", {"lr": "lr"}, significant, "at the last update of the step"),
    Curves(
        "Speed",
        {"tokens_per_second/generate": "generate", "tokens_per_second/train": "train"},
        rate,
        "tokens per second",
    ),
)
EPISODES = (  # for a task with an environment or tools
    Curves(
        "Turns",
        {"episode/turns/mean": "mean", "episode/turns/max": "longest"},
        tenths,
        "messages of the model in an episode",
        held_out={"episode/turns/mean": HELD_OUT},
    ),
    Curves(
        "Tool calls",
        {"episode/calls": "calls", "episode/unreadable": "unreadable", "episode/errors": "answered by an error"},
        count,
        "of all episodes of a step",
        unusual=True,
    ),
    steady(
        "Failures in episodes",
        {
            "episode/cut": "cut by a limit",
            "episode/failed": "failed",
            "episode/retried": "restarted",
            "episode/forks": "forks",
        },
        count,
        "of a step; failed ones have no score, and a fork is a further sequence to train on",
        unusual=True,
    ),
    Curves(
        "Where episodes wait",
        {"time/turns": "for the model", "time/environment": "for environments"},
        duration,
        "seconds of a step, those of concurrent episodes added up",
    ),
)
MARGIN = "of the chosen completion minus that of the rejected one"
EXAMPLE_CURVES = (  # for training on a fixed data set
    Curves(
        "Accuracy",
        {"accuracy": "training", "rewards/accuracies": "training"},
        three,
        "share of right choices",
        ends=SHARE,
        held_out={"accuracy": HELD_OUT, "length_only/accuracy": "held-out, by length alone"},
    ),
    training_and_held_out("Margin", "rewards/margins", f"implicit reward {MARGIN}"),
    training_and_held_out("Margin", "margin", f"score {MARGIN}"),
    training_and_held_out("Loss", "loss", "of the examples of a step", zero=False),
    Curves(
        "Implicit rewards",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        three,
        "beta times the log-ratio to the reference; both may fall while the margin grows",
    ),
    floating(
        "Log-probs",
        {"logps/chosen": "chosen", "logps/rejected": "rejected"},
        tenths,
        "nats of a completion, summed over its tokens",
    ),
    floating(
        "Scores",
        {"reward_mean": "mean", "reward_max": "highest", "reward_min": "lowest"},
        three,
        "of the completions of a step",
    ),
    *(curves for curves in CURVES if curves.title in ("Gradient norm", "Learning rate", "Speed")),
)


def age_curves(explanation: str) -> Curves:
    """Return the chart of the ages of groups, in policy versions."""
    return steady("Age", {"age/mean": "mean", "age/max": "oldest"}, fixed, explanation)


# For runs with steps that used other prompts than they generated.
REFILL = (
    steady(
        "Acceptance",
        {"acceptance": "accepted"},
        InPercent(1),
        f"% of the generated and scored prompts that no selection dropped, over {RECENT} steps",
    ),
    steady("Generation batches", {"gen_batches": "generated"}, count, "until the batch of the step was full"),
    age_curves("policy versions since the groups were generated; 0 means in this step"),
)
KEPT = steady(
    "Completions",
    {"completions": "generated", "kept": "kept for the update"},
    count,
    "of a step; pruning trains on a part of them",
)
ASYNCHRONOUS = (  # who waits for whom
    steady(
        "Queue",
        {"async/queue": "finished", "async/running": "running"},
        count,
        "groups that wait for their step, and prompts that are generated or scored, at the end of a step",
    ),
    age_curves("policy versions by which the oldest token of a group is behind, when its step takes it"),
    Curves(
        "Idle",
        {"idle/trainer": "trainer", "idle/engine": "engine"},
        InPercent(1),
        "% of a step: the trainer waits for groups; the engine generates nothing",
    ),
)
