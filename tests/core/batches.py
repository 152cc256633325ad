"""Random packed batches of `proxima.conformance` as a hypothesis strategy."""

from hypothesis import strategies as st

from proxima.conformance.batches import CENTRES, BatchCase, make_batch


@st.composite
def batch_cases(draw: st.DrawFn, min_sequences: int = 1) -> BatchCase:
    """Batches of up to six sequences of 0 to 9 tokens, with a key for a law's own choices."""
    batch = make_batch(
        draw(st.lists(st.integers(0, 9), min_size=min_sequences, max_size=6)),
        seed=draw(st.integers(0, 2**31)),
        spread=draw(st.sampled_from([0.0, 0.05, 0.3, 2.0])),
        out_of_loss=draw(st.sampled_from([0.0, 0.3, 1.0])),
        not_sampled=draw(st.sampled_from([0.0, 0.2])),
        proximal=draw(st.sampled_from(CENTRES)),
    )
    return BatchCase(batch, draw(st.integers(0, 2**31)))
