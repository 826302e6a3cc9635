import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fp4pipe.runtime.engine.text import REPLACEMENT, Detokenizer, StopStrings, Vocabulary

TEXTS = (
    "plain words, then a newline\n\n  and spaces",
    "Grüße aus München, naïve café",
    "你好，世界！こんにちは 안녕하세요",
    "🤗👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301",
    "a literal \N{REPLACEMENT CHARACTER} in the text",
    "עברית العربية हिन्दी",
)


@pytest.fixture(scope="module")
def byte_level(tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="module")
def sentencepiece() -> Vocabulary:
    """Llama 2's kind: words start with ▁, what is not in the vocabulary falls back to bytes, one leading space goes."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "▁Hello", "▁world", "lo", "e", "é", "你", ",", "▁▁", ".", "x"]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary(
        PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    )


def pieces(vocabulary: Vocabulary, ids: list[int], context: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    stream = vocabulary.stream(context, skip_special_tokens=skip)
    return [*(stream.push(token, may_stop=True)[0] for token in ids), stream.finish()[0]]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_split_a_character(byte_level: Vocabulary, text: str) -> None:
    got = pieces(byte_level, byte_level.tokenizer.encode(text))
    assert "".join(got) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in got)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_any_tokens_of_a_byte_level_vocabulary_join_to_the_full_decode(byte_level, ids, skip) -> None:
    assert "".join(pieces(byte_level, ids, skip=skip)) == byte_level.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, 2),
            st.integers(259, 269),
            st.sampled_from([3 + byte for byte in "A你é🤗".encode()]),
            st.integers(3, 258),
        ),
        max_size=30,
    )
)
def test_any_tokens_of_a_byte_fallback_vocabulary_join_to_the_full_decode(sentencepiece, ids) -> None:
    assert "".join(pieces(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_a_space_after_the_prompt_is_kept(sentencepiece: Vocabulary) -> None:
    hello, world = (sentencepiece.tokenizer.convert_tokens_to_ids(t) for t in ("▁Hello", "▁world"))
    assert pieces(sentencepiece, [world], [hello])[0] == " world"
    assert pieces(sentencepiece, [world], [])[0] == "world"


def test_a_prompt_that_ends_within_a_character_is_completed(byte_level: Vocabulary) -> None:
    ids = [byte_level.tokenizer.convert_tokens_to_ids(c) for c in byte_level.tokenizer.tokenize("世")]
    if len(ids) == 1:
        pytest.skip("one token")
    assert "".join(pieces(byte_level, ids[1:], ids[:1])) == "世"


def test_long_invalid_bytes_are_streamed_with_a_bounded_window(byte_level: Vocabulary) -> None:
    rng = random.Random(0)
    lead = byte_level.tokenizer.encode("世")[0]
    ids = [lead] * 300 + [rng.randrange(5, 200) for _ in range(20)]
    decoded: list[int] = []
    stream = byte_level.stream([], skip_special_tokens=True)
    inner = stream._detokenizer
    decode = inner._decode
    inner._decode = lambda tokens: (decoded.append(len(tokens)), decode(tokens))[1]
    text = "".join(stream.push(token, may_stop=True)[0] for token in ids) + stream.finish()[0]
    assert text == byte_level.decode(ids)
    assert max(decoded) < 50


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tokens_that_cut_characters_anywhere_join_to_the_full_decode(data) -> None:
    pieces_of = ["你", "é", "🤗", "a", "\N{REPLACEMENT CHARACTER}"]
    raw = "".join(data.draw(st.lists(st.sampled_from(pieces_of), max_size=60))).encode()
    if data.draw(st.booleans()):
        raw = raw.replace(b"a", b"\xff")
    # Cuts just after the first byte of a character keep the text's end open for as long as possible.
    opening = [i + 1 for i, byte in enumerate(raw) if byte >= 0xC0]
    cuts = opening if data.draw(st.booleans()) else sorted(data.draw(st.sets(st.integers(1, max(1, len(raw))))))
    table = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stream = Detokenizer(
        lambda ids: b"".join(table[i] for i in ids).decode("utf-8", "replace"), visible=range(len(table))
    )
    assert "".join([*map(stream.push, range(len(table))), stream.flush()]) == raw.decode("utf-8", "replace")


def test_tokens_without_text_cost_nothing(byte_level: Vocabulary) -> None:
    assert pieces(byte_level, [2, 2, 9999, 2]) == [""] * 5


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_stop_strings_cut_at_the_first_and_show_nothing_of_it(text, stops, data) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream, out, met = StopStrings(stops), "", None
    for chunk in chunks:
        piece, met = stream.push(chunk)
        out += piece
        if met:
            break
        assert not any(stop in out for stop in stops)
    if not met:
        out += stream.flush()
    # The first stop string to be complete wins; of those complete in the same chunk, the one that starts first.
    ends = [text.find(stop) for stop in stops if stop in text]
    assert (met is not None) == bool(ends)
    if met is None:
        assert out == text
    else:
        assert text.startswith(out + met)
        assert not any(stop in out for stop in stops)


def test_a_stop_string_across_tokens_is_never_streamed(byte_level: Vocabulary) -> None:
    ids = byte_level.tokenizer.encode("one two END three")
    stream = byte_level.stream([], skip_special_tokens=True, stop=["END"])
    out = ""
    for token in ids:
        piece, met = stream.push(token, may_stop=True)
        out += piece
        assert "E" not in out
        if met:
            break
    assert (out, met) == ("one two ", "END")
