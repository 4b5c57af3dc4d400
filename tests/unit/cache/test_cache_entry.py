"""Entries of the disk cache as bytes: whole or refused, and a key that is a function of every component."""

from __future__ import annotations

import io
import json

import pytest
from cache_support import entry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchport.cache.entry import CacheEntry, Damaged, decode, encode, key_of, read_description

GOOD = encode(entry(7, 400))
KEY = entry(7, 400).key

names = st.text(min_size=1, max_size=12)
manifests = st.dictionaries(names, st.text(max_size=20), min_size=1, max_size=8)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text makes a table of all of Unicode
@given(manifests, st.binary(max_size=300), st.dictionaries(names, st.integers() | st.text(max_size=9), max_size=3))
def test_what_was_written_is_read(manifest: dict[str, str], data: bytes, about: dict[str, object]) -> None:
    one = CacheEntry(manifest, data, about)
    written = encode(one)
    assert decode(written, one.key) == one
    described = read_description(io.BytesIO(written))
    assert (described.manifest, described.about, described.size) == (manifest, about, len(data))


@given(manifests, st.data())
def test_the_key_is_a_function_of_every_component(manifest: dict[str, str], data: st.DataObject) -> None:
    key = key_of(manifest)
    assert key == key_of(dict(sorted(manifest.items(), reverse=True)))
    name = data.draw(st.sampled_from(sorted(manifest)))
    assert key_of({**manifest, name: manifest[name] + "x"}) != key
    assert key_of({other: value for other, value in manifest.items() if other != name}) != key
    assert key_of({**manifest, name + "'": manifest[name]}) != key


mutations = st.one_of(
    st.tuples(st.just("set"), st.integers(0, len(GOOD) - 1), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, len(GOOD) - 1), st.just(0)),
    st.tuples(st.just("add"), st.integers(0, len(GOOD)), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("drop"), st.integers(0, len(GOOD) - 1), st.integers(1, 60)),
    st.tuples(st.just("move"), st.integers(0, len(GOOD) - 1), st.integers(0, len(GOOD) - 1)),
)


def _mutated(kind: str, at: int, what: int | bytes) -> bytes:
    if kind == "add":
        assert isinstance(what, bytes)
        return GOOD[:at] + what + GOOD[at:]
    assert isinstance(what, int)
    if kind == "set":
        return GOOD[:at] + bytes([what]) + GOOD[at + 1 :]
    if kind == "cut":
        return GOOD[:at]
    if kind == "drop":
        return GOOD[:at] + GOOD[at + what :]
    low, high = sorted((at, what))
    return GOOD[:low] + GOOD[high:] + GOOD[low:high]


@settings(max_examples=300)
@given(mutations)
def test_mutated_entries_are_refused(mutation: tuple[str, int, int | bytes]) -> None:
    data = _mutated(*mutation)
    if data == GOOD:
        assert decode(data, KEY) == entry(7, 400)
        return
    with pytest.raises(Damaged):
        decode(data, KEY)


@given(st.binary(max_size=400))
def test_any_bytes_are_an_entry_or_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data, KEY)
    with pytest.raises(Damaged):
        read_description(io.BytesIO(data))


def test_an_entry_under_another_name_is_refused() -> None:
    with pytest.raises(Damaged, match=KEY):
        decode(GOOD, "0" * 64)


def test_a_description_that_says_it_is_very_long_is_not_read() -> None:
    with pytest.raises(Damaged, match="would have"):
        read_description(io.BytesIO(GOOD[:8] + b"\xff" * 7 + b"\0" + GOOD[16:]))


def test_keys_do_not_depend_on_how_json_is_written() -> None:
    manifest = {"b": "ü", "a": "1"}
    assert key_of(manifest) == key_of(json.loads(json.dumps(manifest)))
    assert len(key_of(manifest)) == 64
