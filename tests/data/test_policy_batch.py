"""PolicyBatch: what it refuses and how it says so, the bridge from padded tensors, and taking sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.data.policy_batch import PolicyBatch

NAN = float("nan")


def batch(lengths=(2, 0, 3), **changes):
    n = sum(lengths)
    fields = {
        "log_prob": -torch.arange(1.0, n + 1),
        "advantage": torch.arange(0.0, n),
        "loss_mask": torch.ones(n).bool(),
    }
    fields["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return PolicyBatch(**(fields | changes))


def refusal(**changes):
    with pytest.raises(ValueError) as caught:
        batch(**changes)
    return str(caught.value)


def test_a_short_field_is_named_with_both_shapes_and_who_set_the_size():
    text = "shape [4], expected [N] with N = 5 set by PolicyBatch.log_prob. "
    text += "One value per response token: was the last cut off?"
    assert refusal(loss_mask=torch.ones(4).bool()) == f"PolicyBatch.loss_mask: {text}"
    assert refusal(behavior_log_prob=torch.zeros(4)) == f"PolicyBatch.behavior_log_prob: {text}"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("log_prob", torch.zeros(5).bfloat16(), "dtype bfloat16, expected float32 or float64."),
        ("loss_mask", torch.ones(5), "dtype float32, expected bool. Use `mask != 0`"),
        ("policy_version", torch.zeros(5), "dtype float32, expected int64 or int32."),
        ("behavior_log_prob", [0.0] * 5, "got list, expected a tensor"),
        ("group", torch.zeros(2).long(), "shape [2], expected [S] with S = 3 set by PolicyBatch.cu_seqlens"),
        ("advantage", torch.zeros(5, 1), "shape [5, 1], expected [N]."),
    ],
)
def test_a_wrong_field_is_named(field, value, said):
    assert refusal(**{field: value}).startswith(f"PolicyBatch.{field}: {said}")


def test_top_k_fields_agree_in_their_second_axis():
    text = refusal(top_k=torch.zeros(5, 4, dtype=torch.long), top_k_log_prob=torch.zeros(5, 3))
    assert text == "PolicyBatch.top_k_log_prob: shape [5, 3], expected [N, K] with K = 4 set by PolicyBatch.top_k."


@pytest.mark.parametrize("cut", [[0, 2, 4], [1, 2, 5], [0, 3, 2, 5], [0, 2, 6], [5], [0]])
def test_cu_seqlens_that_do_not_cover_the_tokens_are_refused(cut):
    with pytest.raises(ValueError, match=r"PolicyBatch.cu_seqlens: .*, expected 0 … N = 5, ascending."):
        batch(cu_seqlens=torch.tensor(cut))


def test_defaults():
    behavior = torch.full((5,), -0.5)
    b = batch(behavior_log_prob=behavior)
    assert b.proximal_log_prob is behavior and b.sampled.all() and b.group.tolist() == [0, 1, 2]
    assert (len(b), b.sequences, b.lengths.tolist(), b.sequence_index.tolist()) == (5, 3, [2, 0, 3], [0, 0, 2, 2, 2])
    assert batch().proximal_log_prob is None
    apart = batch(behavior_log_prob=behavior, proximal_log_prob=behavior - 1)
    assert apart.proximal_log_prob.tolist() == [-1.5] * 5


def test_a_batch_of_nothing():
    b = batch(lengths=())
    assert (len(b), b.sequences) == (0, 0) and b.to_padded(b.log_prob).shape == (0, 0)
    empty = batch(lengths=(0, 0))
    assert (len(empty), empty.sequences) == (0, 2) and empty.take([1]).sequences == 1


def test_masked_selects_and_never_multiplies():
    mask = torch.tensor([True, False, True, False, True])
    log_prob = torch.tensor([-1.0, NAN, -3.0, float("inf"), -5.0], requires_grad=True)
    b = batch(loss_mask=mask, log_prob=log_prob)
    value = b.masked("log_prob", fill=7.0)
    assert value.tolist() == [-1, 7, -3, 7, -5]
    value.square().sum().backward()
    assert log_prob.grad.tolist() == [-2, 0, -6, 0, -10]
    with pytest.raises(ValueError, match="PolicyBatch.reference_log_prob is missing"):
        b.masked("reference_log_prob")


def test_from_padded_keeps_holes_and_drops_padding():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    values = torch.tensor([[-1.0, -2, -3, NAN], [NAN] * 4, [-9, -10, NAN, NAN]])
    rows = {"advantage": torch.tensor([1.0, 2, 3]), "group": torch.tensor([4, 4, 5])}
    b = PolicyBatch.from_padded(mask, log_prob=values, **rows)
    assert b.cu_seqlens.tolist() == [0, 3, 3, 5] and b.log_prob.tolist() == [-1, -2, -3, -9, -10]
    assert b.loss_mask.tolist() == b.sampled.tolist() == [True, False, True, False, True]
    assert b.advantage.tolist() == [1, 1, 1, 3, 3] and b.group.tolist() == [4, 4, 5]


def test_sampled_tokens_behind_the_last_loss_token_are_no_padding():
    mask, sampled = torch.tensor([[1, 0, 0, 0]]), torch.tensor([[1, 0, 1, 0]])
    b = PolicyBatch.from_padded(mask, log_prob=torch.zeros(1, 4), sampled=sampled)
    assert len(b) == 3 and b.loss_mask.tolist() == [True, False, False] and b.sampled.tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_mask_may_be_of_any_dtype_of_zeros_and_ones(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(dtype)
    assert PolicyBatch.from_padded(mask, log_prob=torch.zeros(2, 3)).cu_seqlens.tolist() == [0, 2, 3]


PADDED, BY_MASK = "from_padded", "set by from_padded.mask"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("advantag", torch.zeros(2), f"{PADDED}: PolicyBatch has no field 'advantag'; did you mean 'advantage'?"),
        ("cu_seqlens", torch.zeros(3).long(), f"{PADDED}: PolicyBatch has no field 'cu_seqlens'; known: "),
        ("log_prob", None, f"{PADDED}: log_prob is missing; PolicyBatch documents it"),
        ("advantage", torch.zeros(3), f"{PADDED}.advantage: shape [3], expected [B] with B = 2 {BY_MASK}"),
        ("advantage", torch.zeros(2, 3, 1), f"{PADDED}.advantage: shape [2, 3, 1], expected [B, T]."),
        ("group", torch.zeros(6).long(), f"{PADDED}.group: shape [6], expected [B] with B = 2 {BY_MASK}"),
        ("top_k", torch.zeros(2, 3).long(), f"{PADDED}.top_k: shape [2, 3], expected [B, T, K]."),
        ("log_prob", [[0.0] * 3] * 2, f"{PADDED}.log_prob: got list, expected a tensor."),
        ("mask", [[1] * 3] * 2, f"{PADDED}.mask: got list, expected a tensor."),
        ("mask", torch.ones(3), f"{PADDED}.mask: shape [3], expected [B, T]"),
        ("mask", torch.tensor([[1, 1, 2]] * 2), f"{PADDED}: mask holds values other than 0 and 1"),
        ("sampled", torch.ones(3, 3), f"{PADDED}.sampled: shape [3, 3], expected [B, T] with B = 2 set by {PADDED}."),
    ],
)
def test_from_padded_says_in_one_line_which_field_is_wrong(name, value, line):
    given = {"mask": torch.ones(2, 3), "log_prob": torch.zeros(2, 3)} | {name: value}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ValueError) as error:
        PolicyBatch.from_padded(given.pop("mask"), **given)
    assert str(error.value).startswith(line) and len(str(error.value).splitlines()) == 1


@st.composite
def masks(draw):
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    bits = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    return torch.tensor(bits, dtype=torch.bool).view(rows, width)


@pytest.mark.slow
@given(mask=masks())
def test_to_padded_is_the_inverse_of_from_padded(mask):
    rows, width = mask.shape
    values = torch.arange(1.0, rows * width + 1).view(rows, width)
    ids = torch.stack([values.long(), values.long() + 100], dim=2)
    b = PolicyBatch.from_padded(mask, log_prob=-values, top_k=ids)
    longest = int(b.lengths.max()) if rows else 0
    inside = torch.arange(longest) < b.lengths[:, None]
    padded = b.to_padded(b.log_prob, fill=0.5)
    assert torch.equal(padded, torch.where(inside, -values[:, :longest], 0.5))
    assert torch.equal(b.to_padded(b.loss_mask.float()).bool(), mask[:, :longest])
    assert not mask[:, longest:].any()
    assert torch.equal(b.to_padded(b.top_k, fill=-1)[inside], ids[:, :longest][inside])
    mask, sampled, log_prob = (b.to_padded(part.float()) for part in (b.loss_mask, b.sampled, b.log_prob))
    again = PolicyBatch.from_padded(mask, sampled=sampled, log_prob=log_prob)
    assert torch.equal(again.log_prob, b.log_prob) and torch.equal(again.cu_seqlens, b.cu_seqlens)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6), data=st.data())
def test_take_moves_whole_sequences_with_every_field(lengths, data):
    n = sum(lengths)
    facts = {"policy_version": torch.arange(n), "top_k": torch.arange(2 * n).view(n, 2)}
    b = batch(lengths, group=torch.arange(len(lengths)) * 10, **facts)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    taken = b.take(order)
    rows = [list(range(int(b.cu_seqlens[s]), int(b.cu_seqlens[s + 1]))) for s in order]
    flat = [i for row in rows for i in row]
    assert taken.lengths.tolist() == [len(row) for row in rows]
    assert taken.policy_version.tolist() == flat and taken.log_prob.tolist() == [-(i + 1.0) for i in flat]
    assert taken.top_k.tolist() == [[2 * i, 2 * i + 1] for i in flat]
    assert taken.group.tolist() == [10 * s for s in order]


def test_data_that_a_model_computed_has_no_gradient():
    own = torch.zeros(5, requires_grad=True)
    b = batch(log_prob=own * 2, behavior_log_prob=own + 1, entropy=own * 3)
    assert b.log_prob.requires_grad and b.entropy.requires_grad and not b.behavior_log_prob.requires_grad
    assert b.behavior_log_prob.tolist() == [1.0] * 5


def test_batches_follow_each_other():
    mask = torch.tensor([True, False, True])
    parts = [batch((2, 0)), batch((3,), loss_mask=mask, group=torch.tensor([4])), batch((1,))]
    b = PolicyBatch.cat([part if part.group is not None else part.take([*range(part.sequences)]) for part in parts])
    assert b.cu_seqlens.tolist() == [0, 2, 2, 5, 6]
    assert b.log_prob.tolist() == [-1.0, -2.0, -1.0, -2.0, -3.0, -1.0]
    assert b.loss_mask.tolist() == [True, True, True, False, True, True]
    assert (b.counts.tokens, b.counts.sampled) == ((2, 0, 3, 1), (2, 0, 3, 1))
