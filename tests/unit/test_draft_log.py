"""The draft server's log and its messages: prefixes whatever arrives, bounds, another log after a loss."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafting.server import (
    GAP_S,
    GROUP_BYTES,
    GROWTH_BYTES,
    RESPONSE_BYTES,
    DraftLog,
    DraftServer,
    _Log,
    is_local,
)
from paceline.drafting.wire import (
    TOKEN_BYTES,
    Append,
    Fetch,
    GroupNews,
    GroupPieces,
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


def test_a_gap_that_nobody_fills_is_no_news_for_ever() -> None:
    made = log()
    made.append(1, [Piece(5, 3, text(4))], 0.0)
    (news,) = made.fetch([Want(1, 0, 0)], 0.0)
    want = Want(1, news.log, news.until)
    assert [one.behind for one in made.fetch([want], GAP_S)] == [((5, 0),)]
    assert made.fetch([want], GAP_S + 1) == ()
    made.append(1, [Piece(5, 4, text(5))], GAP_S + 2)
    assert [one.behind for one in made.fetch([want], GAP_S + 2)] == [((5, 0),)], "its worker still lives"


def test_a_response_for_which_there_is_no_room_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker would tell it again and again."""
    monkeypatch.setattr("paceline.drafting.server.MOST_RESPONSES", 1)
    made = log()
    made.append(1, [Piece(5, 0, text(1)), Piece(6, 0, text(2)), Piece(6, 1, text(3))], 0.0)
    (news,) = made.fetch([Want(1, 0, 0)], 0.0)
    assert news.behind == ()
    assert heard((news,)) == {5: [1]}


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
    size = 10 * TOKEN_BYTES + GROWTH_BYTES + RESPONSE_BYTES + GROUP_BYTES
    made = log(max_bytes=3 * size)
    for group in range(3):
        made.append(group, [Piece(5, 0, text(*range(10)))], 0.0)
    made.fetch([Want(0, 0, 0)], 1.0)
    made.append(3, [Piece(5, 0, text(*range(10)))], 2.0)
    assert len(made) == 3
    assert made.num_bytes == 3 * size
    kept = {n.group for n in made.fetch([Want(g, 0, 0) for g in (0, 2, 3)], 3.0) if n.pieces}
    assert kept == {0, 2, 3}
    made.append(4, [Piece(key, 0, text(*range(10))) for key in range(99)], 4.0)
    assert made.num_bytes <= 3 * size


def test_growths_of_a_few_tokens_cost_little_and_come_in_one_piece() -> None:
    """64 responses of 1000 tokens that grew by 1 to 3: with a record for each growth it was 90 bytes a token."""
    made, rng = log(max_bytes=1 << 30), np.random.default_rng(0)
    known = np.zeros(64, int)
    tracemalloc.start()
    while known.min() < 1000:
        for key, grown in enumerate(rng.integers(1, 4, 64).tolist()):
            made.append(7, [Piece(key, int(known[key]), text(*range(known[key], known[key] + grown)))], 0.0)
            known[key] += grown
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / known.sum() < 8
    assert 0.8 < made.num_bytes / used < 1.2
    (news,) = made.fetch([Want(7, 0, 0)], 0.0)
    assert len(news.pieces) == 64
    assert heard((news,)) == {key: list(range(count)) for key, count in enumerate(known.tolist())}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=60),
    st.integers(1, 30),
    st.data(),
)
def test_a_log_that_is_read_in_parts_gives_each_token_once(
    grown: list[tuple[int, int]], room: int, data: st.DataObject
) -> None:
    made, known = _Log(1, 0.0), dict.fromkeys(range(4), 0)
    found: dict[int, list[int]] = {key: [] for key in range(4)}
    since = 0
    for key, count in grown:
        made.grow(key, text(*range(known[key], known[key] + count)))
        known[key] += count
        while since < len(made.order) and data.draw(st.booleans()):
            since, pieces = made.read(since, room)
            assert len({piece.key for piece in pieces}) == len(pieces)
            for piece in pieces:
                assert piece.start == len(found[piece.key])
                found[piece.key] += np.frombuffer(piece.tokens, "<i4").tolist()
    while since < len(made.order):
        since, pieces = made.read(since, room)
        for piece in pieces:
            found[piece.key] += np.frombuffer(piece.tokens, "<i4").tolist()
    assert found == {key: list(range(count)) for key, count in known.items()}


def test_a_long_growth_is_read_whole() -> None:
    made = log(max_bytes=1 << 30)
    made.append(1, [Piece(5, 0, text(*range(200_000))), Piece(6, 0, text(1))], 0.0)
    (news,) = made.fetch([Want(1, 0, 0)], 0.0)
    assert heard((news,)) == {5: list(range(200_000)), 6: [1]}


def test_malformed_pieces_are_ignored() -> None:
    made = log()
    made.append(1, [Piece(5, -1, text(1)), Piece(5, 0, b"abc"), Piece(5, 0, b"")], 0.0)
    assert heard(made.fetch([Want(1, 0, -5)], 0.0)) == {}


MESSAGES = [
    Append((GroupPieces(1, (Piece(2**64 - 1, 0, text(1, 2)),)), GroupPieces(2, ()))),
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


def test_groups_that_are_only_asked_for_stay_within_the_bound() -> None:
    made = log(max_bytes=4 * GROUP_BYTES)
    news = made.fetch([Want(group, 0, 0) for group in range(40)], 0.0)
    assert (
        len(news) == 40
    )  # each is told of its log, which may be another one when it is told of the next time
    assert made.num_bytes == 4 * GROUP_BYTES
    assert [one.log for one in made.fetch([Want(39, news[39].log, 0)], 0.0)] == []
