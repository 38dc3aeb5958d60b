"""Channels carry messages whole, in order and without waiting; whatever else comes is the end."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.base.wires import Message, StreamChannel, decode, encode


class Note(Message, frozen=True):
    text: str
    number: float = 0.0

    def __post_init__(self) -> None:
        if self.number < 0:
            raise UsageError(f"{self.number} is below 0")


class Other(Message, frozen=True):
    """Another message."""


@pytest.fixture
def channels():
    here, there = socket.socketpair()
    ends = StreamChannel(here, Note), StreamChannel(there, Note | Other)
    yield ends
    for end in ends:
        end.close()


def test_a_stream_keeps_what_the_other_end_does_not_read(channels):
    here, there = channels
    assert there.receive() == []
    sent = [Note("x" * 10**6, number) for number in range(4)]
    for note in sent:
        here.send(note)
    received = []
    while len(received) < 4:
        received += there.receive()
        here.flush()
    assert received == sent
    there.send(Note("back"))
    assert here.receive() == [Note("back")]


def test_a_stream_may_wait_until_all_is_sent(channels):
    here, there = channels
    received, long = [], Note("x" * 10**7)
    sender = threading.Thread(target=here.send, args=(long,), kwargs={"waits": True})
    sender.start()
    while not received:
        received += there.receive()
    sender.join()
    assert received == [long]


def test_a_stream_ends_after_its_last_message(channels):
    here, there = channels
    here.send(Note("last"))
    here.close()
    assert there.receive() == [Note("last")]
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises(EOFError):
        there.send(Note("nobody reads it"), waits=True)


@pytest.mark.parametrize(
    "data", [encode(Other()), b"garbage", struct.pack("<I", 1 << 30), struct.pack("<I", 2) + b"{}"]
)
def test_a_stream_that_brings_something_else_has_ended(channels, data: bytes):
    here, there = channels
    there._connection.send(data if data[:1] != b"{" else struct.pack("<I", len(data)) + data)
    with pytest.raises(EOFError):
        here.receive()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"message":"Note","text":"","number":-1}', "-1.0 is below 0"),
        (b'{"message":"Note","\\u001b[2J":1}', "it is not what this version writes: "),
        (b'{"a":' * 20_000, "it is nested too deep"),
    ],
)
def test_what_is_refused_is_said_in_printable_text(data: bytes, text: str):
    with pytest.raises(ValueError, match=r".") as caught:
        decode(data, Note | Other)
    assert str(caught.value).startswith(text)
    assert str(caught.value).isprintable()


def test_numbers_of_numpy_are_plain_ones():
    assert decode(encode(Note("", np.float64(0.5))), Note) == Note("", 0.5)
