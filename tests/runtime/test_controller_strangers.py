"""The clock controller serves its ranks whatever other processes send to it, and reports why it
cannot start.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest
from controller_ranks import (
    LONG_S,
    attached,
    eventually,
    process_of,
    set_clock,
)

from perseus_planner.base.errors import ControllerLost, GpuError
from perseus_planner.runtime.controller.client import Connection, start_controller
from perseus_planner.runtime.controller.protocol import (
    SOCKET_KIND,
    AttachRequest,
    ControlChange,
    ControlFailure,
    Credentials,
    GpuSample,
    Handshakes,
    socket_name,
)
from perseus_planner.runtime.marks import clock_request

SIMULATED = "simulated:a100-sxm"


GARBAGE = (
    b"\n",
    b"not json\n",
    b"[" * 60000,
    b'{"message":"DetachRequest"}\n',
    b'{"message":"AttachRequest","rank":0}\n',
    b'{"message":"AttachRequest","rank":true,"gpu":"nvml:1","control":"clock","launcher":null}\n',
    b'{"message":"AttachRequest","rank":5,"gpu":"nvml:1","control":"clock","launcher":null}\n',
    b"\xff\xfe\n",
    b'{"message":"DetachReply","problem":null}\n',
)


@pytest.fixture(scope="module")
def simulated_rank() -> Iterator[Connection]:
    with attached([SIMULATED], ranks=1) as (connection,):
        yield connection


def check_served(connection: Connection) -> None:
    set_clock(connection, 900)
    set_clock(connection, 1200)


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_from_a_stranger_changes_nothing_for_others(
    simulated_rank: Connection, line: bytes
):
    with _stranger(simulated_rank) as stranger:
        stranger.send(line)
        answer = stranger.recv(65536)
        assert answer.startswith(
            b'{"message":"AttachRefusal","error":"GpuError","text":"the clock controller does not '
            b"understand"
        )
        assert stranger.recv(65536) == b""
    check_served(simulated_rank)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_memory_that_could_shrink_is_refused(simulated_rank: Connection, is_sealed: bool):
    attach_request = (
        b'{"message":"AttachRequest","rank":5,"gpu":"nvml:1","control":"clock","launcher":null}\n'
    )
    descriptor = (
        os.memfd_create("small", os.MFD_ALLOW_SEALING)
        if is_sealed
        else os.open("/dev/zero", os.O_RDWR)
    )
    try:
        with _stranger(simulated_rank) as stranger:
            socket.send_fds(stranger, [attach_request], [descriptor])
            assert b"its shared memory can" in stranger.recv(65536)
    finally:
        os.close(descriptor)
    check_served(simulated_rank)


def test_strangers_that_send_nothing_and_leave_are_forgotten(simulated_rank: Connection):
    process = process_of(simulated_rank)
    before = process.num_fds()
    for _ in range(3):
        strangers = [_stranger(simulated_rank) for _ in range(40)]
        for stranger in strangers:
            stranger.close()
    # Fewer, if what came before was not closed yet.
    eventually(lambda: process.num_fds() <= before)
    check_served(simulated_rank)


def test_a_rank_too_many_is_refused(simulated_rank: Connection):
    connection = Connection(_address(simulated_rank), AttachRequest(9, SIMULATED, "clock", None))
    with (
        connection,
        pytest.raises(
            GpuError, match="all 1 ranks of this node have attached; rank 9 is one too many"
        ),
    ):
        connection.attach(LONG_S)
    check_served(simulated_rank)


def test_messages_that_a_rank_does_not_read_are_dropped_and_counted_and_its_failure_is_sent_at_last():  # noqa: E501
    with attached([SIMULATED, SIMULATED], max_changes_per_s=1e6) as (idle, other):
        for place in range(600):
            idle.request[0] = clock_request(place, 900 + 15 * (place % 2))
            set_clock(other, 900 + 15 * (place % 2), place)
        idle.request[0] = clock_request(600, 1)
        set_clock(other, 1200)
        set_clock(other, 900)
        heard = idle.messages()
        while ControlFailure not in (kinds := [type(message) for message in heard]):
            heard += idle.messages()
        assert 100 < kinds.count(ControlChange) < 600
        assert kinds.count(ControlFailure) == 1
        assert idle.detach(LONG_S) is None
        last = [message for message in idle.messages() if isinstance(message, GpuSample)][-1]
        assert last.dropped > 100


def _address(connection: Connection) -> str:
    return connection._channel._connection.getpeername()[1:].decode()


def _stranger(connection: Connection) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    stranger.connect(socket_name(_address(connection)))
    return stranger


def test_only_the_same_user_is_trusted():
    assert Credentials(1, os.geteuid()).is_same_user()
    assert not Credentials(1, os.geteuid() + 1).is_same_user()


def test_a_stranger_of_another_user_is_rejected_unheard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Credentials, "is_same_user", lambda _: False)
    handshakes = Handshakes()
    with socket.socket(socket.AF_UNIX, SOCKET_KIND) as stranger:
        stranger.connect(socket_name(handshakes.address))
        assert handshakes.serve(set(handshakes.descriptors()), 0) == []
        assert stranger.recv(100) == b""
        with pytest.raises(ControllerLost, match="belongs to user"):
            Connection(handshakes.address, AttachRequest(0, SIMULATED, "clock", None))
    handshakes.close()


def test_a_rank_learns_that_there_is_no_controller():
    with pytest.raises(ControllerLost, match="cannot be reached at perseus-planner-none"):
        Connection("perseus-planner-none", AttachRequest(0, SIMULATED, "clock", None))


def test_an_answer_that_does_not_come_is_not_waited_for():
    address = start_controller(2, 100.0, LONG_S)
    connection = Connection(address, AttachRequest(0, SIMULATED, "clock", None))
    with connection, pytest.raises(GpuError, match=r"did not answer within 0\.1 s"):
        connection.attach(0.1)


def test_a_controller_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        GpuError, match=r"could not be started: 0.0 changes per second: give 0\.001 or more"
    ):
        start_controller(1, 0.0, LONG_S)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(GpuError, match="could not be started: it ended without any output"):
        start_controller(1, 1.0, LONG_S)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(GpuError, match=r"sys\.executable does not name the Python"):
        start_controller(1, 1.0, LONG_S)


def test_a_controller_that_is_not_ready_in_time_is_given_up():
    with pytest.raises(GpuError, match=r"was not ready within 0 s"):
        start_controller(1, 1.0, 0.0)
