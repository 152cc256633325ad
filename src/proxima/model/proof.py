"""Proves at load that what proxima computes with a model is the model: no list says which models those are.

Every law is checked on a twin (`tiny_twin`), in float32 on the CPU, against the twin's own logits of one sequence at a
time:

    head       the logits are the output head applied to the last hidden state
    causal     those of a prefix are those of the whole sequence there
    apart      a packed (or padded) batch gives each sequence the log-probs that it has alone
    repeated   a second pass over the batch gives the same bits, and gradients: no setting leaves anything random
    decoder    the engine, prompt and then token by token, gives the same log-probs; see `proxima.engine.local.decoders`

`head`, `causal` and `repeated` must hold. Of the ways to run a batch, and of the decoders, the first is chosen for
which the law holds; if none does, the model is refused with the figure. A batch is run as in an update: in eval mode,
with gradient, and with layers recomputed in the backward pass if the update does so. An exception is a reason too,
unless it is a fault of ours: see `proxima.model.faults`.
"""

import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from proxima.data import FieldError, UserError
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory
from proxima.model.architecture import TextConfig, model_class, parts, scalar_parts
from proxima.model.attention import ATTENTION, FLASH, hugging_face_name, why_flash
from proxima.model.faults import is_ours
from proxima.model.parallel.sharding import plain_type
from proxima.model.positions import fixed_length, fixed_length_of
from proxima.model.recompute import recompute_layers
from proxima.model.tiny_twin import DROPPED, FIRST_ID, make_twin

TOLERANCE = (
    1e-4  # nats of the twin's log-probs, in float32; where a scale or a mask is forgotten they differ by .01 to 10
)
KEPT = 8  # proofs: those of the models of a run
WIDE = 1e7  # the largest logit of a twin with a wide head
ROUNDING = 1e-5  # of that logit, relative
UNREAD = (*DROPPED, "_name_or_path", "architectures", "pad_token_id")  # fields of a config that change no computation

# prompt, response; the first two are of one group, and together longer than the windows of a twin
LENGTHS = ((7, 5), (7, 2), (1, 8), (20, 8))
# tokens
LONGEST = 28
PREFIXES = (2, 5, 7, 10, 12, *range(14, 28))

T = TypeVar("T")

_proofs: dict[Any, "Proof"] = {}


def proof_of(model: nn.Module) -> "Proof":
    """The proof of a model, made once for each class and config.

    Raises:
        UserError: the model breaks a law that must hold; the message names its class, and what differs by how much.
    """
    untyped: Any = model
    return _proof(plain_type(model), untyped.config, fixed_length(model))


def proof_before_loading(config: Any, max_length: int | None = None, *, scalar: bool = False) -> "Proof":
    """The proof that `proof_of` gives of a model with this config, before its weights are loaded.

    Args:
        max_length: as in `fix_positions`.
        scalar: the model gets, or has, a scalar head.

    Raises:
        UserError: as `proof_of`, or transformers has no such class for the config.
    """
    kind, config = model_class(config, scalar=scalar)
    return _proof(kind, config, fixed_length_of(config, max_length))


def _proof(kind: type[nn.Module], config: Any, longest: int | None) -> "Proof":
    key = kind, longest, json.dumps(_read_fields(config.to_dict()), sort_keys=True, default=repr)
    if key not in _proofs:
        proof = in_own_thread(lambda: Proof(kind, config, longest))
        while len(_proofs) >= KEPT:
            _proofs.pop(next(iter(_proofs)), None)
        _proofs[key] = proof
    return _proofs[key]


def _read_fields(fields: dict[str, Any]) -> dict[str, Any]:
    read = {}
    for name, value in fields.items():
        if name not in UNREAD:
            read[name] = _read_fields(value) if isinstance(value, dict) else value
    return read


def in_own_thread(call: Callable[[], T]) -> T:
    """Call in a thread of its own, which ends afterwards.

    A thread that computes keeps a team of OpenMP threads until it ends. Once there are more of them than cores, all of
    them sleep while they wait: a proof in the event loop's thread made every later step of a run 10 % slower. The new
    thread has none of the caller's modes, such as autocast, or a rehearsal's tensors without data."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


class Proof:
    """The twin of a model with what is expected of it, and the result of each way to run it that was tried."""

    def __init__(self, kind: type[nn.Module], config: Any, longest: int | None) -> None:
        self.name = kind.__name__
        self.twin: Any = make_twin(kind, config, longest)
        self.scalar = not self.twin.can_generate()
        self.backbone, self.head = self.parts_of(self.twin)
        self.rows = sequences(self.twin)
        try:
            self.expected = [self.own_outputs(row) for row in self.rows]  # [T, V] log-probs of the responses, or [T, 1]
        except Exception as error:
            if is_ours(error, kind):
                raise
            raise self.refused(f"a small copy of it can't be run: {reason_of(error)}") from error
        self.problems: dict[Any, str | None] = {}
        self._check_repeated()
        self._check_head()
        if not self.scalar:
            self._check_causality()

    def parts_of(self, twin: Any) -> tuple[Any, Any]:
        return scalar_parts(twin) if self.scalar else parts(twin)

    def refused(self, reason: str) -> UserError:
        return UserError(f"{self.name} is not supported: {reason}")

    @torch.no_grad()
    def own_logits(self, tokens: Sequence[int], twin: Any = None) -> Tensor:
        """[T, V] a twin's own logits of one sequence; [1, 1] its score, of a scalar model."""
        model = twin or self.twin
        logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        return logits.float().flatten(0, -2)

    def own_outputs(self, row: Trajectory) -> Tensor:
        """What the twin says alone of a row's response tokens: [T, V] log-probs, or [T, 1] scores of what is before."""
        whole = [*row.prompt_tokens.tolist(), *row.tokens.tolist()]
        start = len(row.prompt_tokens)
        if self.scalar:
            return torch.cat([self.own_logits(whole[:end]) for end in range(start, len(whole))])
        return self.own_logits(whole)[start - 1 : -1].log_softmax(-1)

    def of_states(self, states: Tensor) -> Tensor:
        """`own_outputs` of the states that predict the tokens, by the head."""
        outputs: Tensor = self.head(states).float()
        return outputs if self.scalar else outputs.log_softmax(-1)

    def _check_repeated(self) -> None:
        """Nothing may be drawn in eval mode: a policy whose log-probs depend on a draw has no ratio to itself."""
        again = self.own_outputs(self.rows[-1])
        apart = float((again - self.expected[-1]).abs().max())
        if apart > 0:
            raise self.refused(f"two passes of a small copy over the same tokens are {apart:.2g} nats apart")

    @torch.no_grad()
    def _check_head(self) -> None:
        """The outputs must be what the head gives: with the weights as they are drawn, beside which a forgotten bias
        shows, and with a head whose outputs are as large as `WIDE`. A cap of 1,000 changes ordinary logits by less than
        their rounding; and a scale that is nearly 1 is far from it there."""
        own = self._compare_head(self.twin, lambda largest: TOLERANCE * max(1.0, largest))
        wide = copy.deepcopy(self.twin)
        _, head = self.parts_of(wide)
        largest = max(float(own.abs().max()), 1e-3)
        head.weight.mul_(WIDE / largest)
        self._compare_head(wide, lambda largest: ROUNDING * largest)

    def _compare_head(self, twin: Any, allowed: Callable[[float], float]) -> Tensor:
        """The own outputs of a twin, if its head gives the same."""
        backbone, head = self.parts_of(twin)
        tokens = some_ids(twin, LONGEST, 3)
        try:
            states = backbone(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        except Exception as error:
            if is_ours(error, plain_type(twin)):
                raise
            raise self.refused(f"its decoder can't be run without its head: {reason_of(error)}") from error
        own = self.own_logits(tokens, twin)
        ours = head(states)[0].float()
        if self.scalar:  # a score is of a whole sequence
            own = torch.cat([self.own_logits(tokens[:length], twin) for length in PREFIXES])
            ours = ours[[length - 1 for length in PREFIXES]]
        outputs = "score is" if self.scalar else "logits are"
        if own.shape != ours.shape:
            raise self.refused(f"it gives {list(own.shape)} outputs, and its output head {list(ours.shape)}")
        # a mask is far from what the head gives
        own = own.nan_to_num()
        ours = ours.nan_to_num()
        largest = float(ours.abs().max())
        scale = float((own * ours).sum() / ours.square().sum())
        apart = float((own - ours).abs().max())
        if apart <= allowed(largest):
            return own
        if float((own - scale * ours).abs().max()) <= allowed(largest):
            raise self.refused(f"its {outputs} {scale:.6g} times what its output head gives")
        reason = f"its {outputs} not what its output head gives for its last hidden state"
        raise self.refused(f"{reason}: off by {apart:.2g}")

    def _check_causality(self) -> None:
        """Prefixes of sequences that are several windows long: a layer that selects keys may break ties by what
        follows."""
        tokens = some_ids(self.twin, LONGEST, 1)
        whole = self.own_logits(tokens).log_softmax(-1)
        for length in PREFIXES:
            problem = off(self.own_logits(tokens[:length]).log_softmax(-1), whole[:length])
            if problem:
                raise self.refused(f"its log-probs depend on tokens that follow: {problem}")

    def problem(self, attention: str, *, recompute: bool = False) -> str | None:
        """How the outputs of a batch that is run this way differ from those of one sequence at a time, or from those of
        a second pass; None if they do not.

        Args:
            recompute: with gradient checkpointing.
        """
        way = attention, recompute
        if way not in self.problems:
            self.problems[way] = in_own_thread(lambda: self._problem(attention, recompute))
        return self.problems[way]

    def _problem(self, attention: str, recompute: bool) -> str | None:
        twin = copy.deepcopy(self.twin)
        if attention != "padded" or twin._supports_sdpa:
            twin.set_attn_implementation(hugging_face_name(attention))
        if recompute:
            recompute_layers(twin)
        try:
            first = self._trained(twin, attention)
            again = self._trained(twin, attention)
        except Exception as error:
            if is_ours(error, plain_type(twin)):
                raise
            return reason_of(error)
        apart = max(float((one - other).abs().max()) for one, other in zip(first, again, strict=True))
        if apart > 0:
            return f"two passes over the same tokens are {apart:.2g} nats apart"
        return off(first[0], torch.cat(self.expected))

    @torch.enable_grad()
    def _trained(self, twin: Any, attention: str) -> tuple[Tensor, Tensor]:
        """The outputs of a batch, and the gradient of their mean by the twin's embedding."""
        backbone, _ = self.parts_of(twin)
        batch = pack(self.rows, share_prompt=attention != "padded")
        outputs = self.of_states(ATTENTION[attention](backbone, batch))
        (gradient,) = torch.autograd.grad(outputs.mean(), twin.get_input_embeddings().weight)
        return outputs.detach(), gradient

    def attention(self, asked: str = "auto", *, recompute: bool = False) -> str:
        """`packed` if it keeps sequences apart, else `padded` if that does.

        Args:
            asked: a key of `ATTENTION`, or `auto`.
            recompute: with gradient checkpointing.

        Raises:
            UserError: neither does. FieldError: `asked`, which is not `auto`, does not.
        """
        tried = {path: self.problem(path, recompute=recompute) for path in ("packed",) if asked != "padded"}
        if all(tried.values()):
            tried["padded"] = self.problem("padded", recompute=recompute)
        path = next((path for path, problem in tried.items() if problem is None), None)
        if path is None:
            reason = "a batch of several sequences does not give the log-probs that each has alone"
            raise self.refused(f"{reason} ({'; '.join(f'{name}: {problem}' for name, problem in tried.items())})")
        if asked == "auto" or asked == path or (asked in FLASH and path == "packed"):
            return path if asked == "auto" else asked
        bound = f"does not keep the sequences of a {self.name} apart ({tried['packed']})"
        raise FieldError("model.attention", asked, bound, remedy="set model.attention=auto, or padded")

    def why(self, attention: str, device: torch.device, *, recompute: bool = False) -> str:
        """Why `auto` has chosen this attention.

        Args:
            device: on which the model computes.
            recompute: with gradient checkpointing.
        """
        if attention == "padded":
            problem = self.problem("packed", recompute=recompute)
            return f"packed does not keep the sequences of a {self.name} apart ({problem})"
        kept = "it keeps the sequences of a batch apart, as a small copy of the model shows"
        if attention in FLASH:
            return f"{kept}, and {why_flash(attention, device)}"
        return kept


def sequences(twin: Any) -> list[Trajectory]:
    """Rows of `LENGTHS`, drawn from the vocabulary of a twin; those of one group share their prompt."""
    ids = some_ids(twin, 64, 7)
    prompts = dict[int, list[int]]()
    rows = list[Trajectory]()
    for prompt, response in LENGTHS:
        first = prompts.setdefault(prompt, [ids.pop() for _ in range(prompt)])
        tokens = [ids.pop() for _ in range(response)]
        columns: Any = {"prompt_tokens": first, "tokens": tokens}
        rows.append(Trajectory(group=list(prompts).index(prompt), **columns))
    return rows


def some_ids(twin: Any, count: int, seed: int) -> list[int]:
    """Ids of the twin's vocabulary, none of them special."""
    most = twin.get_input_embeddings().weight.shape[0]
    config = TextConfig.of(twin.config)
    special = {i for i in (config.pad, config.bos, config.eos) if isinstance(i, int)}
    usual = [i for i in range(FIRST_ID, most) if i not in special] or list(range(most))
    draws = torch.Generator().manual_seed(seed)
    return [usual[i] for i in torch.randint(len(usual), (count,), generator=draws).tolist()]


def off(ours: Tensor, expected: Tensor) -> str | None:
    """`off by … nats`; None for what is equal up to the rounding of float32."""
    if ours.shape != expected.shape:
        return f"{list(ours.shape)} outputs in place of {list(expected.shape)}"
    error = float((ours - expected).abs().max())
    if error <= TOLERANCE:
        return None
    return f"off by {error:.2g} nats"


def reason_of(error: Exception) -> str:
    """An error in one line; of those that are written for users, the message alone."""
    said = str(error).strip().splitlines()
    if isinstance(error, UserError):
        return error.reason.removesuffix(".")
    if said:
        return f"{type(error).__name__}: {said[0][:160]}"
    return type(error).__name__
