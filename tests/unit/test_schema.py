"""Records, their bytes, and rollout keys."""

import base64
import math
import pickle
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.schema import errors, records
from fulmen.schema.codec import (
    from_json,
    from_msgpack,
    pack_floats,
    pack_tokens,
    to_json,
    to_msgpack,
    unpack_floats,
    unpack_tokens,
)
from fulmen.schema.errors import DataError, FulmenError, LeaseLost
from fulmen.schema.keys import KeyClaims, KeyRefused, mint_key, read_key
from fulmen.schema.records import Call, Outcome, Record, Retry, Rollout, Sampling, Task, VersionSpan

SECRET = b"a secret of the server"
CLAIMS = KeyClaims(rollout_id="r1", attempt=2, expires=1000.0, seed=7)

texts = st.text(max_size=8)
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
plain_json = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
KINDS = [kind for kind in vars(records).values() if isinstance(kind, type(Record))] + [KeyClaims]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field, from its annotation."""
    simple = {Any: plain_json, str: texts, int: integers, float: floats, bool: st.booleans()}
    if hint in simple:
        return simple[hint]
    if hint is type(None):
        return st.none()
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return records_of(hint)


def records_of(kind: type[Record]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: values(h) for name, h in get_type_hints(kind).items()})


# --- records


@given(st.sampled_from([k for k in KINDS if k is not Record]).flatmap(records_of))
@settings(max_examples=300, deadline=None)
def test_every_record_comes_back_from_json_and_msgpack_as_it_was(record: Record):
    kind = type(record)
    assert from_json(kind, to_json(record)) == record
    assert from_msgpack(kind, to_msgpack(record)) == record


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"id": "t", "input": 1, "inptu": 2}', "unknown field `inptu`"),
        (b'{"id": "t"}', "missing required field `input`"),
        (b'{"id": 5, "input": 1}', r"Expected `str`, got `int` - at `\$.id`"),
        (b'{"id": "t", "input": 1, "metadata": []}', "Expected `object`, got `array`"),
        (b'{"id": "t", "input": ', "not a Task"),
        (b"\xff", "not a Task"),
        (b"", "not a Task"),
    ],
)
def test_json_that_is_no_task_is_refused_with_the_reason(text: bytes, why: str):
    with pytest.raises(DataError, match=why):
        from_json(Task, text)


def test_msgpack_that_is_no_record_is_refused_with_the_reason():
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"failure": "bad luck"}), b"\x81\xa1x\x01"):
        with pytest.raises(DataError, match="not a Outcome"):
            from_msgpack(Outcome, data)


def test_a_record_cannot_be_changed():
    for record in (Task(id="t", input=1), Sampling(), CLAIMS):
        with pytest.raises(AttributeError, match="immutable"):
            record.id = "other"  # type: ignore[misc, union-attr]


def test_a_grader_sees_the_metadata_and_the_agent_does_not():
    task = Task(id="t", input={"question": "1+1?"}, metadata={"answer": 2})
    assert task.for_grader() == {"question": "1+1?", "answer": 2}
    assert task.input == {"question": "1+1?"}
    assert Task(id="t", input="1+1?", metadata={"answer": 2}).for_grader() == {
        "input": "1+1?",
        "answer": 2,
    }
    assert Task(id="t", input="1+1?").for_grader() == "1+1?"


def test_the_version_of_a_call_is_that_of_its_first_token():
    spans = (VersionSpan(start=0, version=3), VersionSpan(start=9, version=4))
    sampled = call(versions=spans)
    assert sampled.version == 3
    assert call(versions=()).version == -1


def call(versions: tuple[VersionSpan, ...]) -> Call:
    return Call(
        id="c",
        rollout_id="r",
        attempt=1,
        index=0,
        protocol="chat",
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        versions=versions,
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
    )


# --- arrays


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_come_back_from_four_bytes_each(ids: list[int]):
    packed = pack_tokens(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_tokens(packed) == tuple(ids)


def test_packed_numbers_are_little_endian_on_every_machine():
    assert pack_tokens((1, 258)) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert pack_floats((-0.5,)) == b"\x00\x00\x00\xbf"


def test_a_token_id_that_does_not_fit_is_refused_and_not_wrapped():
    with pytest.raises(OverflowError):
        pack_tokens((2**31,))


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_numbers_come_back_bit_for_bit(numbers: list[float]):
    packed = pack_floats(numbers)
    assert packed == np.array(numbers, dtype="<f4").tobytes()
    back = unpack_floats(packed)
    assert back == tuple(numbers)
    assert [math.copysign(1, x) for x in back] == [math.copysign(1, x) for x in numbers]


# --- keys


@given(records_of(KeyClaims), st.binary(min_size=1))
def test_a_key_gives_back_what_it_states(claims: KeyClaims, secret: bytes):
    assert read_key(mint_key(claims, secret), secret, now=claims.expires) == claims


def test_a_key_can_be_carried_in_a_header():
    assert set(mint_key(CLAIMS, SECRET)).isdisjoint(" \t\r\n\"',;=+/")


def test_a_key_of_another_server_is_refused():
    with pytest.raises(KeyRefused):
        read_key(mint_key(CLAIMS, b"another secret"), SECRET, now=0.0)


def test_a_key_is_good_until_its_time_and_not_after():
    key = mint_key(CLAIMS, SECRET)
    assert read_key(key, SECRET, now=1000.0) == CLAIMS
    with pytest.raises(KeyRefused, match="key of rollout r1, attempt 2, has expired"):
        read_key(key, SECRET, now=1000.001)
    with pytest.raises(KeyRefused, match="expired"):
        read_key(key, SECRET)


def test_claims_that_were_altered_are_refused():
    body = to_msgpack(msgspec.structs.replace(CLAIMS, attempt=3))
    forged = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
    signature = mint_key(CLAIMS, SECRET).partition(".")[2]
    with pytest.raises(KeyRefused):
        read_key(f"fulmen-{forged}.{signature}", SECRET, now=0.0)


def test_a_key_that_lacks_its_end_is_refused_wherever_it_was_cut():
    key = mint_key(CLAIMS, SECRET)
    for length in range(len(key)):
        with pytest.raises(KeyRefused):
            read_key(key[:length], SECRET, now=0.0)


def test_a_key_with_any_character_changed_is_refused():
    key = mint_key(CLAIMS, SECRET)
    # The last character of each part holds spare bits that base64 does not read.
    spare = {key.index(".") - 1, len(key) - 1}
    for place in set(range(len(key))) - spare:
        other = "A" if key[place] != "A" else "B"
        with pytest.raises(KeyRefused):
            read_key(key[:place] + other + key[place + 1 :], SECRET, now=0.0)


@given(st.text() | st.text().map(lambda text: f"fulmen-{text}"))
def test_what_is_no_key_is_refused(text: str):
    with pytest.raises(KeyRefused):
        read_key(text, SECRET, now=0.0)


def test_no_refusal_repeats_the_key():
    key = mint_key(CLAIMS, SECRET)
    for bad, now in ((key, 2000.0), (key[:-4], 0.0), (key.replace(".", "!"), 0.0)):
        with pytest.raises(KeyRefused) as refusal:
            read_key(bad, SECRET, now=now)
        body = bad.removeprefix("fulmen-").partition(".")[0]
        assert body[:12] not in str(refusal.value)
        assert bad not in repr(refusal.value)


# --- errors


def test_an_error_says_what_is_wrong_and_what_to_do():
    assert str(FulmenError("x is 5", hint="make it 4")) == "x is 5; make it 4"
    assert str(FulmenError("x is 5")) == "x is 5"


def test_every_error_crosses_a_process_boundary_whole():
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    assert LeaseLost in kinds
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("what", hint="remedy")))
        assert (type(back), back.message, back.hint) == (kind, "what", "remedy")


def test_a_rollout_asks_for_what_its_documentation_says():
    rollout = Rollout(id="r", task=Task(id="t", input=1), group="g", step=1)
    assert (rollout.split, rollout.seed, rollout.deadline_s, rollout.retry) == (
        "train",
        0,
        300.0,
        Retry(on=("infrastructure", "timeout"), attempts=3, pause_s=0.0, longest_pause_s=60.0),
    )
