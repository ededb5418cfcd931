"""OTLP, OpenTelemetry's protocol: spans of any instrumented process in, whole rollouts out.

Source: opentelemetry-proto 1.x, `trace/v1/trace.proto`; OTLP/HTTP takes it as protobuf or as JSON
with ids in hexadecimal.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as OtlpStatus

from fulmen.schema.errors import DataError
from fulmen.schema.records import JSON, Call, RolloutResult, Span
from fulmen.schema.semconv import (
    AGENT_NAME,
    CHAT,
    ERROR_MESSAGE,
    OPERATION,
    REQUEST_MODEL,
    RESPONSE_ID,
)
from fulmen.tracing.current import trace_id_of
from fulmen.tracing.normalise import Raw, Status, normalise

PROTOBUF = "application/x-protobuf"
MOST_SPANS = 20_000
"""Of one request."""
_NANOSECONDS = 1_000_000_000
_STATUS: dict[int, Status] = {0: "unset", 1: "ok", 2: "error"}
_CODES = {word: code for code, word in _STATUS.items()}
_IDS = ("traceId", "spanId", "parentSpanId")


def read_spans(body: bytes, content_type: str, *, rollout_id: str, attempt: int) -> list[Span]:
    """The spans of an OTLP/HTTP request, as those of an attempt.

    Raises:
        DataError: the body is not what its content type says, or holds too many.
    """
    found = [
        (span, group.scope.name)
        for resource in _parsed(body, content_type).resource_spans
        for group in resource.scope_spans
        for span in group.spans
        if len(span.span_id) == 8
    ]
    if len(found) > MOST_SPANS:
        raise DataError(f"{len(found)} spans in one request; send at most {MOST_SPANS}")
    return [_record(span, scope, rollout_id, attempt) for span, scope in found]


def _parsed(body: bytes, content_type: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    try:
        if "json" in content_type:
            value = json.loads(body)
            if not isinstance(value, dict):
                raise ValueError("it is no object")
            ParseDict(_with_bytes(value), request, ignore_unknown_fields=True)
        else:
            request.ParseFromString(body)
    except (DecodeError, ParseError, ValueError, RecursionError) as error:
        raise DataError(f"not an OTLP request ({error})") from None
    return request


def _with_bytes(value: JSON) -> JSON:
    """OTLP's JSON writes ids in hexadecimal, where protobuf's own JSON expects base64."""
    if isinstance(value, list):
        return [_with_bytes(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _base64(item) if key in _IDS and isinstance(item, str) else _with_bytes(item)
        for key, item in value.items()
    }


def _base64(hexadecimal: str) -> str:
    try:
        return base64.b64encode(binascii.unhexlify(hexadecimal)).decode()
    except binascii.Error as error:
        raise DataError(f"not an OTLP request (an id is not hexadecimal: {error})") from None


def _record(span: OtlpSpan, scope: str, rollout_id: str, attempt: int) -> Span:
    ended = span.end_time_unix_nano
    raw = Raw(
        name=span.name,
        scope=scope,
        attributes=_attributes(span.attributes),
        status=_STATUS.get(span.status.code, "unset"),
        description=span.status.message,
        exceptions=[_attributes(e.attributes) for e in span.events if e.name == "exception"],
        ended=ended > 0,
    )
    return Span(
        id=span.span_id.hex(),
        rollout_id=rollout_id,
        attempt=attempt,
        parent=span.parent_span_id.hex() or None,
        name=span.name,
        attributes=normalise(raw),
        status=raw.status,
        started=span.start_time_unix_nano / _NANOSECONDS,
        ended=ended / _NANOSECONDS if ended else None,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, JSON]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> JSON:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return None if kind is None else getattr(value, kind)


def write_rollouts(results: Iterable[RolloutResult]) -> bytes:
    """Finished rollouts as an OTLP request (protobuf): a trace each, with its spans and calls.

    A call that has a span of its own (an instrumented client) is that span; any other becomes one.
    """
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.append(_pair("service.name", "fulmen"))
    scope = resource.scope_spans.add()
    scope.scope.name = "fulmen"
    for result in results:
        scope.spans.extend(_spans_of(result))
    return request.SerializeToString()


def _spans_of(result: RolloutResult) -> list[OtlpSpan]:
    trace = trace_id_of(result.rollout.id, result.attempt).to_bytes(16, "big")
    roots = {span.id for span in result.spans if span.parent is None}
    known = {span.attributes.get(RESPONSE_ID) for span in result.spans}
    spans = [_from_span(span, trace, result) for span in result.spans]
    above = next(iter(sorted(roots)), None)
    return spans + [
        _from_call(call, trace, call.span_id or above)
        for call in result.calls
        if call.id not in known
    ]


def _from_span(span: Span, trace: bytes, result: RolloutResult) -> OtlpSpan:
    attributes = dict(span.attributes)
    if span.parent is None:
        attributes |= {
            "fulmen.rollout.id": span.rollout_id,
            "fulmen.attempt": span.attempt,
            "fulmen.step": result.rollout.step,
            "fulmen.task.id": result.rollout.task.id,
        }
    message = str(attributes.get(ERROR_MESSAGE, ""))
    # A span that never ended ends with its attempt, as far as a viewer is concerned.
    latest = max([span.started, *(s.ended or 0.0 for s in result.spans)])
    return OtlpSpan(
        trace_id=trace,
        span_id=bytes.fromhex(span.id),
        parent_span_id=bytes.fromhex(span.parent or ""),
        name=span.name,
        kind=OtlpSpan.SPAN_KIND_INTERNAL,
        start_time_unix_nano=_time(span.started),
        end_time_unix_nano=_time(span.ended or latest),
        attributes=_pairs(attributes | ({} if span.ended else {"fulmen.unfinished": True})),
        status=OtlpStatus(code=_CODES[span.status], message=message),  # type: ignore[arg-type]
    )


def _from_call(call: Call, trace: bytes, parent: str | None) -> OtlpSpan:
    digest = hashlib.blake2b(f"{call.id}/{call.choice}".encode(), digest_size=8).digest()
    failed = call.status >= 400
    return OtlpSpan(
        trace_id=trace,
        span_id=digest,
        parent_span_id=bytes.fromhex(parent or ""),
        name=f"{CHAT} {call.policy}".strip(),
        kind=OtlpSpan.SPAN_KIND_CLIENT,
        start_time_unix_nano=_time(call.started),
        end_time_unix_nano=_time(call.ended),
        attributes=_pairs(
            {
                OPERATION: CHAT,
                RESPONSE_ID: call.id,
                REQUEST_MODEL: call.policy,
                AGENT_NAME: call.agent,
                "gen_ai.usage.input_tokens": len(call.prompt_ids),
                "gen_ai.usage.output_tokens": len(call.completion_ids),
                "gen_ai.response.finish_reasons": [call.finish_reason],
                "fulmen.policy.version": call.version,
                "http.response.status_code": call.status,
            }
        ),
        status=OtlpStatus(code=OtlpStatus.STATUS_CODE_ERROR if failed else 0),  # type: ignore[arg-type]
    )


def _time(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)


def _pairs(attributes: Mapping[str, JSON]) -> list[KeyValue]:
    return [_pair(key, value) for key, value in attributes.items() if value is not None]


def _pair(key: str, value: JSON) -> KeyValue:
    return KeyValue(key=key, value=_any(value))


def _any(value: JSON) -> AnyValue:
    found = AnyValue()
    if isinstance(value, bool):
        found.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        found.int_value = value
    elif isinstance(value, float):
        found.double_value = value
    elif isinstance(value, list):
        found.array_value.values.extend(_any(item) for item in value)
    else:
        found.string_value = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
