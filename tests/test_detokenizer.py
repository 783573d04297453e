"""Detokenisation: with any cut, the text is that of the reference; never half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from tokenizer_folders import load, reference

from engine.text.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer_for


def pushed(detokenizer: ByteDetokenizer | WindowDetokenizer, chunks: list[list[int]]) -> str:
    return "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.finish()


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, begin = [], 0
    for size in sizes:
        chunks.append(ids[begin : begin + size])
        begin += size
    return [*chunks, ids[begin:]]


SIZES = st.lists(st.integers(0, 4), max_size=12)


TEXT_OR_BYTES = st.lists(
    st.one_of(
        st.integers(0, 2).map(lambda i: [i]),
        st.integers(259, 419).map(lambda i: [i]),
        st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()]),
    ),
    max_size=25,
).map(lambda groups: [i for group in groups for i in group])


IDS = {
    "byte_level": st.lists(st.integers(0, 420), max_size=30),
    "llama2": TEXT_OR_BYTES,
    "llama2_new": TEXT_OR_BYTES,
    "unigram": st.lists(st.integers(0, 70), max_size=20),
    "words": st.lists(st.integers(0, 6), max_size=40),
}
"""Token ids by tokenizer: byte level, byte fallback, metaspace, and a decoder that goes through a window."""


@fuzz(300)
@given(data=st.data(), sizes=SIZES)
@pytest.mark.parametrize("name", IDS)
def test_text_is_that_of_transformers(name: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer, hf, ids = load(name), reference(name), data.draw(IDS[name])
    assert (tokenizer.byte_rule is None) == (name == "words")
    for skip in (True,) if name in ("unigram", "words") else (True, False):
        expected = hf.decode(ids, skip_special_tokens=skip)
        detokenizer = detokenizer_for(tokenizer, skip_special_tokens=skip)
        assert pushed(detokenizer, cut(ids, sizes)) == expected
        assert name != "byte_level" or tokenizer.decode(ids, skip_special_tokens=skip) == expected


@fuzz(200)
@given(ids=st.lists(st.integers(0, 419), max_size=20), sizes=SIZES)
def test_byte_fallback_does_not_depend_on_the_cut(ids: list[int], sizes: list[int]) -> None:
    """Any ids, also bytes that are no UTF-8: there a decoder that sees a whole run of bytes may show more of them as
    U+FFFD, which a stream cannot know in time."""
    tokenizer = load("llama2")
    assert pushed(detokenizer_for(tokenizer), cut(ids, sizes)) == tokenizer.decode(ids)


@fuzz(200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
@pytest.mark.parametrize("name", ["byte_level", "llama2_new"])
def test_no_push_ends_inside_a_character(name: str, text: str) -> None:
    tokenizer = load(name)
    detokenizer = detokenizer_for(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    seen = ""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        assert whole.startswith(seen)
    assert seen + detokenizer.finish() == whole


def test_text_after_a_prompt_keeps_its_leading_space_and_completes_characters() -> None:
    tokenizer = load("llama2")
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert pushed(detokenizer_for(tokenizer), [ids]) == "the dog"
    assert pushed(detokenizer_for(tokenizer, tokenizer.encode("hello")), [ids]) == " the dog"
    assert pushed(detokenizer_for(tokenizer, [1]), [ids]) == "the dog", "a bos token is no text"
    euro = [3 + byte for byte in "€".encode()]
    assert pushed(detokenizer_for(tokenizer, euro[:1]), [euro[1:]]) == "€"
    words = load("words")
    assert pushed(detokenizer_for(words, [2]), [[1, 3]]) == " beta"


def test_unfinished_characters_come_out_at_the_end() -> None:
    tokenizer = load("byte_level")
    ids = [i for i in range(300) if tokenizer.token_bytes(i) == b"\xe2"]
    detokenizer = detokenizer_for(tokenizer)
    assert detokenizer.push(ids) == "" and detokenizer.holds_text
    assert detokenizer.finish() == "\ufffd"
