"""Stop strings, and the text and tokens of one choice."""

from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from tokenizer_folders import load

from engine.text.detokenizer import OutputTextStream, StopMatcher

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first complete stop string begins, and which it is, by brute force."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


@fuzz(500)
@given(chunks=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_stop_matching(chunks: list[str], stops: tuple[str, ...], include: bool) -> None:
    text = "".join(chunks)
    expected = first_stop(text, stops)
    matcher = StopMatcher(stops, include)
    shown, fed = "", ""
    for chunk in chunks:
        out, found = matcher.push(chunk)
        shown, fed = shown + out, fed + chunk
        if found:
            break
        held = fed[len(shown) :]
        assert fed == shown + held
        assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
        assert not any(stop.startswith(fed[i:]) for i in range(len(shown)) for stop in stops), "let through too much"
    if expected is None:
        assert matcher.matched is None and shown + matcher.flush() == text
    else:
        begin, stop = expected
        assert matcher.matched == stop
        assert shown == text[: begin + len(stop)] if include else shown == text[:begin]
    assert matcher.position == len(shown) if expected else matcher.position == len(text)


def test_no_stop_strings_hold_nothing_back() -> None:
    matcher = StopMatcher(("",))
    assert matcher.push("abc") == ("abc", None) and matcher.flush() == ""


# ---- one choice


def letters(text: str) -> list[int]:
    """One token per byte."""
    tokenizer = load("byte_level")
    table = {tokenizer.token_bytes(i): i for i in range(256)}
    return [table[bytes([byte])] for byte in text.encode()]


@fuzz(200)
@given(
    text=st.text("ab€🙂", max_size=20),
    stops=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2).map(tuple),
    size=st.integers(1, 5),
    include=st.booleans(),
)
def test_a_choice_has_the_text_before_the_stop_and_the_tokens_that_made_it(
    text: str, stops: tuple[str, ...], size: int, include: bool
) -> None:
    stream = OutputTextStream(load("byte_level"), stop=stops, include_stop=include)
    shown, count, found = "", 0, None
    ids = letters(text)
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids) + 1, size)]
    for index, chunk in enumerate(chunks):
        delta = stream.push(chunk, final=index == len(chunks) - 1)
        shown, count, found = shown + delta.text, count + delta.num_tokens, delta.stop
        if found:
            break
        assert count == len(shown.encode()), "exactly the tokens of the characters shown"
    expected = first_stop(text, stops)
    if expected is None:
        assert (shown, found) == (text, None)
    else:
        begin, stop = expected
        assert found == stop and shown == text[: begin + len(stop) * include]
    assert count == len(shown.encode())


def test_a_token_split_by_a_stop_string_counts() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode("the dog")
    assert len(ids) < 7, "tokens of several letters"
    stream = OutputTextStream(tokenizer, stop=("e dog",))
    deltas = [stream.push([token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "th" and deltas[-1].stop == "e dog"
    assert sum(delta.num_tokens for delta in deltas) == 1


def test_min_tokens_delays_stop_strings() -> None:
    stream = OutputTextStream(load("byte_level"), stop=("ab",), min_tokens=3)
    delta = stream.push(letters("ababab"))
    assert (delta.text, delta.stop, delta.num_tokens) == ("abab"[:3] + "b", "ab", 4)


def test_special_tokens_add_no_text_but_count() -> None:
    tokenizer = load("byte_level")
    end = tokenizer.encode("<|im_end|>")
    stream = OutputTextStream(tokenizer, stop=("zz",))
    delta = stream.push([*letters("az"), *end], final=True)
    assert (delta.text, delta.num_tokens) == ("az", 3)
