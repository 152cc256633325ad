"""Between the SDK's protocol buffers and our values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as protocol

from proxima.data import UserError
from proxima_tinker.datum import Array, Datum

DTYPES: dict[int, Any] = {
    protocol.DTYPE_FLOAT32: np.dtype("<f4"),
    protocol.DTYPE_INT64: np.dtype("<i8"),
    protocol.DTYPE_INT32: np.dtype("<i4"),
}
NO_LOG_PROB = -99999.0  # in the SDK's tables of likely tokens, an empty cell


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """A request for a forward pass, and unless `forward_only` for the gradient of its loss."""

    model_id: str
    seq_id: int
    loss: str
    config: dict[str, float | str]
    forward_only: bool
    data: list[Datum]


def address_of(body: bytes) -> tuple[str, int]:
    """Model and sequence number of an encoded `ForwardBackward`.

    Raises:
        UserError: it can't be decoded.
    """
    message = _decoded(body)
    return message.model_id, message.seq_id


def _decoded(body: bytes) -> Any:
    message = protocol.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return message


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode a request.

    Raises:
        UserError: names what can't be read.
    """
    message = _decoded(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = [_datum(i, datum) for i, datum in enumerate(message.data)]
    if not data:
        raise UserError("the request has no examples")
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
        data=data,
    )


def _datum(number: int, message: Any) -> Datum:
    place = f"example {number}"
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"{place}: a chunk of kind {kind}; only text is served")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.dtype("<i4")))
    columns = {name: _array(f"{place}: {name}", tensor) for name, tensor in message.loss_fn_inputs.items()}
    if "target_tokens" not in columns:
        raise UserError(f"{place}: loss_fn_inputs has no target_tokens")
    targets = columns.pop("target_tokens").astype(np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *parts])
    return Datum(
        tokens=tokens, targets=targets, columns={name: values.astype(np.float32) for name, values in columns.items()}
    )


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
        raise ValueError(f"a sparse tensor of shape {list(shape)} is not a matrix")
    rows = np.diff(np.frombuffer(csr.crow_indices, "<i8"))
    columns, values = np.frombuffer(csr.col_indices, "<i8"), np.frombuffer(csr.values, dtype)
    if shape[0] * shape[1] > 50_000_000:
        raise ValueError(f"a tensor of shape {list(shape)} is too large")
    if len(rows) != shape[0] or (rows < 0).any() or rows.sum() != len(columns) or len(columns) != len(values):
        raise ValueError("the indices of a sparse tensor do not fit its shape")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ValueError("a column index of a sparse tensor is outside its shape")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), rows), columns] = values
    return out


def forward_backward_answer(outputs: Sequence[dict[str, Array]], metrics: dict[str, float]) -> bytes:
    """Encode the outputs of each example, all with the same names, and the metrics of the request."""
    answer = protocol.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for shape in _runs([next(iter(output.values())).shape[1:] for output in outputs]):
        record = answer.loss_fn_outputs.add(num_datums=shape[1] - shape[0])
        for name in outputs[0]:
            parts = [np.ascontiguousarray(output[name], "<f4") for output in outputs[shape[0] : shape[1]]]
            batched = record.fields[name]
            batched.data = b"".join(part.tobytes() for part in parts)
            batched.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype("<i8").tobytes()
            batched.dtype = protocol.DTYPE_FLOAT32
            batched.trailing_shape.extend(parts[0].shape[1:])
    content: bytes = answer.SerializeToString()
    return content


def _runs(values: Sequence[Any]) -> list[tuple[int, int]]:
    """The ranges of equal neighbours."""
    edges = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(zip(edges, [*edges[1:], len(values)], strict=True))


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """A completion: tokens [T] int32, log-probs [T] float32, whether a stop ended it, and the most likely tokens of
    each position."""

    tokens: Array
    log_probs: Array
    stopped: bool
    top_k: tuple[Array, Array] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptAnswer:
    """Log-probs of a prompt's tokens [P] float32, NaN where unknown; the most likely tokens [P, K] and their log-probs;
    log-probs of requested tokens [P - 1, K]."""

    log_probs: Array | None = None
    top_k: tuple[Array, Array] | None = None
    targets: Array | None = None


def sample_answer(completions: Sequence[SampledAnswer], prompt: PromptAnswer) -> bytes:
    """Encode the answer to a request for samples."""
    answer = protocol.SampleResponse()
    for completion in completions:
        sequence = answer.sequences.add(
            stop_reason=protocol.STOP_REASON_STOP if completion.stopped else protocol.STOP_REASON_LENGTH,
            tokens=completion.tokens.astype("<i4").tobytes(),
            logprobs=completion.log_probs.astype("<f4").tobytes(),
        )
        if completion.top_k is not None:
            _write_top_k(sequence.topk_sampled_logprobs, *completion.top_k)
    if prompt.log_probs is not None:
        answer.prompt_logprobs = prompt.log_probs.astype("<f4").tobytes()
    if prompt.top_k is not None:
        _write_top_k(answer.topk_prompt_logprobs, *prompt.top_k)
    if prompt.targets is not None:
        answer.target_prompt_logprobs.dense = prompt.targets.astype("<f4").tobytes()
        answer.target_prompt_logprobs.dtype = protocol.DTYPE_FLOAT32
        answer.target_prompt_logprobs.shape.extend(prompt.targets.shape)
    content: bytes = answer.SerializeToString()
    return content


def _write_top_k(message: Any, ids: Array, log_probs: Array) -> None:
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), log_probs.astype("<f4").tobytes()
    message.length, message.k = ids.shape
