"""What travels between the two processes arrives as it was."""

import asyncio

import numpy as np
import pytest

from proxima.data import FieldError, NotFiniteError, UserError
from proxima.engine.process.served_engine import MOST, receive, send
from proxima.engine.protocol import Health
from tests.engine.helpers import engine, requests, run


def there(message):
    """The message at the other end of a stream."""

    class Writer:
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += data

    async def go():
        writer, reader = Writer(), asyncio.StreamReader(limit=MOST)
        send(writer, message)
        send(writer, "the next")
        reader.feed_data(writer.data)
        reader.feed_eof()
        received = await receive(reader)
        assert await receive(reader) == "the next"
        with pytest.raises(asyncio.IncompleteReadError):
            await receive(reader)
        return received

    return asyncio.run(go())


@pytest.mark.slow
def test_completions():
    made = run(engine(slots=8, top_k_log_probs=3), requests(3, 3, top_p=0.8))
    number, kind, received = there((7, "item", made))
    assert (number, kind) == (7, "item") and received == made
    for completion, other in zip(received, made, strict=True):
        assert (
            completion.top_k.shape == other.top_k.shape
            and completion.tokens.flags.writeable
            and completion.tokens.dtype == np.int32
        )
    plain = there(run(engine(slots=8), requests(1, 1)))[0]
    assert plain.sampled_log_prob is plain.untruncated_log_prob


def test_other_values():
    health = Health(ok=True, version=3, detail={"pid": 7, "exits": 0})
    assert there(health) == health
    assert there({"a": b"\x00\n\xff", "b": [None, 1.5, float("inf")]}) == {
        "a": b"\x00\n\xff",
        "b": [None, 1.5, float("inf")],
    }
    empty = there([np.zeros((0, 4), np.float32)])[0]
    assert empty.shape == (0, 4) and empty.dtype == np.float32


def test_errors_keep_what_a_user_reads():
    for error in (
        UserError("bad", remedy="mend it"),
        NotFiniteError("NaN"),
        FieldError("a", 1, "must be 2", remedy="b"),
    ):
        received = there(error)
        assert isinstance(received, UserError) and str(received) == str(error)
    assert type(there(NotFiniteError("NaN"))) is NotFiniteError
    assert repr(there(KeyError("x"))) == "RuntimeError(\"KeyError: 'x'\")"
