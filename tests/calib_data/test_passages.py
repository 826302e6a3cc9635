"""The bundled passages: many, varied, well formed, and none a near-copy of another."""

import json
import re
from collections import Counter
from importlib import resources

FOLDER = resources.files("fp4pipe.calib_data")
FILES = sorted(entry.name for entry in FOLDER.iterdir() if entry.name.endswith(".jsonl"))
ROWS = [json.loads(line) for name in FILES for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
# Scripts that put no spaces between words, and about how many characters make one.
CHARACTERS_A_WORD = {"zh": 2, "ja": 2, "th": 4}


def text_of(row: dict) -> str:
    """All that is said in a passage."""
    return row.get("text") or "\n".join(message["content"] for message in row["messages"])


def words(row: dict) -> list[str]:
    """Lower-case words of a passage."""
    return re.findall(r"\w+", text_of(row).lower())


def test_there_are_enough_of_each_kind() -> None:
    kinds = Counter(row["kind"] for row in ROWS)
    assert len(ROWS) >= 300
    assert kinds["prose"] >= 70
    assert kinds["code"] >= 50
    assert kinds["dialogue"] >= 50
    assert kinds["arithmetic"] >= 35
    assert kinds["languages"] >= 80
    languages = Counter(row["lang"] for row in ROWS)
    assert len(languages) >= 25
    for lang in ("es", "fr", "de", "pt", "it", "nl", "pl", "ru", "zh", "ja", "ko", "ar", "hi", "tr"):
        assert languages[lang] >= 4, lang


def test_fields() -> None:
    assert max(Counter(row["id"] for row in ROWS).values()) == 1
    for row in ROWS:
        assert set(row) in ({"id", "kind", "lang", "text"}, {"id", "kind", "lang", "messages"}), row["id"]
        assert ("messages" in row) == (row["kind"] == "dialogue"), row["id"]


def test_dialogues_take_turns() -> None:
    for row in ROWS:
        roles = [message["role"] for message in row.get("messages", [])]
        if roles[:1] == ["system"]:
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2), row["id"]
        assert all(message["content"].strip() for message in row.get("messages", [])), row["id"]


def test_length() -> None:
    for row in ROWS:
        per_word = CHARACTERS_A_WORD.get(row["lang"])
        count = len(text_of(row)) / per_word if per_word else len(words(row))
        assert 60 <= count <= 260, row["id"]


def test_no_two_share_eight_words_in_a_row() -> None:
    first: dict[tuple[str, ...], str] = {}
    for row in ROWS:
        run = words(row)
        for start in range(len(run) - 7):
            gram = tuple(run[start : start + 8])
            assert first.setdefault(gram, row["id"]) == row["id"], f"{row['id']}: {' '.join(gram)}"


def test_characters_are_clean() -> None:
    for row in ROWS:
        text = text_of(row)
        assert "\ufffd" not in text, row["id"]
        assert "\r" not in text, row["id"]
        assert not re.search(r"[ \t]+\n\n", text), row["id"]
