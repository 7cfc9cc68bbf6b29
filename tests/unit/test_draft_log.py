"""The draft server's log and its messages: prefixes whatever arrives, bounds, another log after a loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafting.server import PIECE_BYTES, DraftLog, DraftServer, is_local
from paceline.drafting.wire import (
    TOKEN_BYTES,
    Append,
    Fetch,
    GroupNews,
    News,
    Piece,
    Seal,
    Want,
    read_secret,
)
from paceline.errors import ConfigError


def text(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def log(max_bytes: int = 1 << 20, ttl_s: float = 60.0) -> DraftLog:
    return DraftLog(max_bytes, ttl_s)


def heard(news: tuple[GroupNews, ...]) -> dict[int, list[int]]:
    """Tokens of each response, by key, from pieces that must follow on each other."""
    found: dict[int, list[int]] = {}
    for group in news:
        for piece in group.pieces:
            own = found.setdefault(piece.key, [])
            assert piece.start == len(own)
            own += np.frombuffer(piece.tokens, "<i4").tolist()
    return found


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=40))
def test_the_log_holds_a_prefix_of_every_response_whatever_arrives(
    sent: list[tuple[int, int, int]],
) -> None:
    made = log()
    known = dict.fromkeys(range(3), 0)
    for key, start, count in sent:
        truth = [100 * key + at for at in range(start, start + count)]
        made.append(7, [Piece(key, start, text(*truth))], 0.0)
        if start <= known[key]:
            known[key] = max(known[key], start + count)
    found = heard(made.fetch([Want(7, 0, 0)], 0.0))
    assert found == {key: [100 * key + at for at in range(n)] for key, n in known.items() if n}


def test_a_fetch_goes_on_where_the_last_one_ended() -> None:
    made = log()
    made.append(1, [Piece(5, 0, text(1, 2))], 0.0)
    (first,) = made.fetch([Want(1, 0, 0)], 0.0)
    assert made.fetch([Want(1, first.log, first.until)], 0.0) == ()
    made.append(1, [Piece(5, 2, text(3)), Piece(6, 0, text(9))], 0.0)
    (second,) = made.fetch([Want(1, first.log, first.until)], 0.0)
    assert [(p.key, p.start) for p in second.pieces] == [(5, 2), (6, 0)]


def test_a_gap_is_named_until_it_is_filled() -> None:
    made = log()
    made.append(1, [Piece(5, 0, text(1)), Piece(5, 3, text(4))], 0.0)
    (news,) = made.fetch([Want(1, 0, 0)], 0.0)
    assert news.behind == ((5, 1),)
    made.append(1, [Piece(5, 1, text(2, 3, 4))], 0.0)
    (news,) = made.fetch([Want(1, 0, 0)], 0.0)
    assert news.behind == ()
    assert heard((news,)) == {5: [1, 2, 3, 4]}


def test_a_dropped_group_comes_back_as_another_log() -> None:
    made = log(ttl_s=10.0)
    made.append(1, [Piece(5, 0, text(1))], 0.0)
    (before,) = made.fetch([Want(1, 0, 0)], 0.0)
    made.expire(5.0)
    assert len(made) == 1
    made.expire(11.0)
    assert len(made) == made.num_bytes == 0
    (after,) = made.fetch([Want(1, before.log, before.until)], 12.0)
    assert after.log != before.log
    assert (after.until, after.pieces) == (0, ())


def test_memory_is_bounded_by_dropping_whole_groups_the_oldest_first() -> None:
    size = 10 * TOKEN_BYTES + PIECE_BYTES
    made = log(max_bytes=3 * size)
    for group in range(3):
        made.append(group, [Piece(5, 0, text(*range(10)))], 0.0)
    made.fetch([Want(0, 0, 0)], 1.0)
    made.append(3, [Piece(5, 0, text(*range(10)))], 2.0)
    assert len(made) == 3
    assert made.num_bytes == 3 * size
    kept = {n.group for n in made.fetch([Want(g, 0, 0) for g in (0, 2, 3)], 3.0) if n.pieces}
    assert kept == {0, 2, 3}
    made.append(4, [Piece(key, 0, text(*range(10))) for key in range(9)], 4.0)
    assert made.num_bytes <= 3 * size


def test_malformed_pieces_are_ignored() -> None:
    made = log()
    made.append(1, [Piece(5, -1, text(1)), Piece(5, 0, b"abc"), Piece(5, 0, b"")], 0.0)
    assert heard(made.fetch([Want(1, 0, -5)], 0.0)) == {}


MESSAGES = [
    Append(1, (Piece(2**64 - 1, 0, text(1, 2)),)),
    Fetch(3, (Want(1, 4, 5),)),
]


@pytest.mark.parametrize("secret", [None, b"sixteen bytes...!"])
def test_messages_come_back_as_sent(secret: bytes | None) -> None:
    seal = Seal(secret)
    for message in MESSAGES:
        assert seal.open_request(seal.pack(message)) == message
    news = News(3, (GroupNews(1, 2, 3, (Piece(4, 5, text(6)),), ((7, 8),)),))
    assert seal.open_news(seal.pack(news)) == news


@given(st.binary(max_size=64))
def test_garbage_is_no_message(frame: bytes) -> None:
    for secret in (None, b"sixteen bytes...!"):
        seal = Seal(secret)
        assert seal.open_request(frame) is None or secret is None
        seal.open_news(frame)
        assert Seal(None).open_news(bytes(16) + frame) is None or len(frame) > 2


def test_another_secret_opens_nothing() -> None:
    one, other, none = Seal(b"a" * 16), Seal(b"b" * 16), Seal(None)
    for sender, receiver in ((one, other), (one, none), (none, one)):
        assert receiver.open_request(sender.pack(MESSAGES[0])) is None
    frame = bytearray(one.pack(MESSAGES[0]))
    frame[-1] ^= 1
    assert one.open_request(bytes(frame)) is None


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 65])
def test_weak_secrets_are_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match="use 16 to 64"):
        Seal(secret)


def test_an_open_address_needs_a_secret() -> None:
    for address in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://10.0.0.1:1", "tcp://[::]:1"):
        assert not is_local(address)
        with pytest.raises(ConfigError, match="give it a secret"):
            DraftServer(address, secret=None)
    for address in ("tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x"):
        assert is_local(address)


def test_an_address_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        DraftServer("tcp://127.0.0.1:notaport", secret=None)


def test_the_secret_comes_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes...!\n")
    assert read_secret(path) == b"sixteen bytes...!"
    assert read_secret(None) is None
    with pytest.raises(ConfigError, match="give a readable file"):
        read_secret(tmp_path / "none")
