"""Between the SDK's protocol buffers and our values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as protocol

from proxima.data import UserError, require
from proxima_tinker.datum import Array, Datum

DTYPES: dict[int, Any] = {protocol.DTYPE_FLOAT32: np.dtype("<f4"), protocol.DTYPE_INT64: np.dtype("<i8")}
MOST_SPARSE = 1 << 25  # cells of all sparse tensors of a request
MOST_PARTS = 1 << 20  # fields of a request and of its examples
EXAMPLES = protocol.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
NO_LOG_PROB = -99999.0  # in the SDK's tables of likely tokens, an empty cell


def request_place(body: bytes) -> tuple[str, int, bool]:
    """Model, sequence number and `forward_only` of an encoded request.

    Raises:
        UserError: it can't be decoded.
    """
    message = _decoded(body)
    return message.model_id, message.seq_id, message.forward_only


def _decoded(body: bytes) -> Any:
    if len(body) > MOST_PARTS:
        _checked_parts(body)
    message = protocol.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return message


# What follows the key of a field: a number, bytes after their count, or always as many bytes.
NUMBER = 0
BYTES = 2
FIXED = {1: 8, 5: 4}


def _checked_parts(body: bytes, at: int = 0, end: int | None = None, left: int = MOST_PARTS) -> int:
    """Count down the fields of a request and of its examples: an empty one of two bytes takes fifty in memory.

    Raises:
        UserError: there are too many.
    """
    outer = end is None
    if end is None:
        end = len(body)
    end = min(end, len(body))
    while at < end:
        left -= 1
        if left < 0:
            raise UserError(f"the request has more than {MOST_PARTS:,} parts; send fewer examples at a time")
        key, at = _varint(body, at, end)
        wire_type = key & 7
        if wire_type == NUMBER:
            _, at = _varint(body, at, end)
            continue
        if wire_type == BYTES:
            size, at = _varint(body, at, end)
        else:
            size = FIXED.get(wire_type, end)
        if wire_type == BYTES and outer and key >> 3 == EXAMPLES:
            left = _checked_parts(body, at, at + size, left)
        at += size
    return left


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        value |= (body[at] & 127) << shift
        at += 1
        shift += 7
        if body[at - 1] < 128:
            break
    return value, at


def read_forward_backward(body: bytes) -> tuple[str, dict[str, float | str], list[Datum]]:
    """The name of the loss of a request, its config and the examples.

    Raises:
        UserError: names what can't be read.
    """
    message = _decoded(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    if not message.data:
        raise UserError("the request has no examples")
    sparse = 0
    for datum in message.data:
        for tensor in datum.loss_fn_inputs.values():
            if tensor.WhichOneof("encoding") == "sparse_csr":
                sparse += math.prod(abs(n) for n in tensor.shape)
    # a few bytes may stand for any number of cells, even for one that has too many digits to be written
    bound = f"is too large for a request, at most {MOST_SPARSE}"
    require(sparse <= MOST_SPARSE, "cells of sparse tensors", min(sparse, 1 << 63), bound)
    return message.loss_fn, config, [_datum(i, datum) for i, datum in enumerate(message.data)]


def _datum(number: int, message: Any) -> Datum:
    place = f"example {number}"
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"{place}: a chunk of kind {kind}; only text is served")
        encoded = chunk.encoded_text.tokens
        if len(encoded) % 4:
            raise UserError(f"{place}: model_input has {len(encoded)} bytes, no whole number of int32")
        parts.append(np.frombuffer(encoded, np.dtype("<i4")))
    columns = {name: _array(f"{place}: {name:.40}", tensor) for name, tensor in message.loss_fn_inputs.items()}
    targets = columns.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise UserError(f"{place}: loss_fn_inputs has no target_tokens of int64")
    tokens = np.concatenate([np.zeros(0, np.int32), *parts])
    floats = {name: values.astype(np.float32) for name, values in columns.items()}
    return Datum(tokens=tokens, targets=targets, columns=floats)


def _array(place: str, tensor: Any) -> Array:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{place}: unsupported dtype {tensor.dtype}")
    shape = tuple(tensor.shape)
    try:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return _dense(tensor.sparse_csr, dtype, shape)
        values: Array = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    except (ValueError, IndexError) as error:
        raise UserError(f"{place}: {error}") from None


def _dense(csr: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
    """The dense form of a sparse matrix, 0 elsewhere."""
    if len(shape) != 2:
        raise ValueError(f"a sparse tensor of shape {list(shape)[:9]} is not a matrix")
    starts = np.frombuffer(csr.crow_indices, "<i8")
    columns = np.frombuffer(csr.col_indices, "<i8")
    values = np.frombuffer(csr.values, dtype)
    # each number of `rows` is bounded by itself: a sum of what a client sends may wrap around
    rows = np.diff(starts)
    fit = len(starts) == shape[0] + 1 and len(columns) == len(values)
    if not fit or (starts[0], starts[-1]) != (0, len(columns)) or ((rows < 0) | (rows > len(columns))).any():
        raise ValueError("the indices of a sparse tensor do not fit its shape")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ValueError("a column index of a sparse tensor is outside its shape")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), rows), columns] = values
    return out


def forward_backward_answer(outputs: Sequence[dict[str, Array]], metrics: dict[str, float]) -> bytes:
    """Encode the outputs of each example, all with the same names and the same number of targets a position, and the
    metrics of the request."""
    answer = protocol.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = answer.loss_fn_outputs.add(num_datums=len(outputs))
    for name in outputs[0]:
        parts = [np.ascontiguousarray(output[name], "<f4") for output in outputs]
        batched = record.fields[name]
        batched.data = b"".join(part.tobytes() for part in parts)
        batched.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype("<i8").tobytes()
        batched.dtype = protocol.DTYPE_FLOAT32
        batched.trailing_shape.extend(parts[0].shape[1:])
    content: bytes = answer.SerializeToString()
    return content


def write_top_k(message: Any, ids: Array, log_probs: Array) -> None:
    """Fill the SDK's table of the likeliest tokens of each position, [T, K]."""
    message.token_ids = ids.astype("<i4").tobytes()
    message.logprobs = log_probs.astype("<f4").tobytes()
    message.length, message.k = ids.shape
