"""The core's end of the link: DEALER sockets, one for data and one for heartbeats."""

from __future__ import annotations

import os
import time
from types import TracebackType

import zmq

from tokenspeed_engine.ipc.errors import HandshakeError, ProtocolError
from tokenspeed_engine.ipc.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Role,
    ToCore,
    ToFrontend,
    decode_hello_reply,
    decode_to_core,
    encode,
)

# Frames that may wait for a slow front end; after that the loop merges outputs by request instead of queueing more.
_SEND_QUEUE_FRAMES = 64
_RECEIVE_BATCH = 4096


class CoreLink:
    """One connection to the front end, used by one thread. Blocking, with time limits."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str,
        role: Role,
        max_message_bytes: int,
        queue_limit: int = 4096,
        timeout_s: float = 30.0,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> None:
        """Connect, and pass the handshake.

        Args:
            endpoint: the front end's address.
            token: the token that this core got at its start.
            role: what the connection is for.
            max_message_bytes: larger messages are neither sent nor received.
            queue_limit: most messages that wait to be taken from the front end.
            timeout_s: longest wait for the front end's answer.
            protocol_version: what to claim; only a test sets it.
        Raises:
            HandshakeError: refused, or no answer in time.
        """
        self._max_message_bytes = max_message_bytes
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, queue_limit)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(endpoint)
        try:
            self._handshake(token, role, timeout_s, protocol_version)
        except BaseException:
            self._socket.close(linger=0)
            raise

    def receive(self, timeout_s: float | None = 0.0) -> list[ToCore | ProtocolError]:
        """All messages that are there, in order; a message that cannot be read is in the list as its error.

        Args:
            timeout_s: wait so long for the first; None waits for ever.
        """
        if timeout_s != 0.0:
            self._socket.poll(None if timeout_s is None else max(int(timeout_s * 1000), 1))
        messages: list[ToCore | ProtocolError] = []
        while len(messages) < _RECEIVE_BATCH:
            try:
                raw = self._socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode_to_core(raw))
            except ProtocolError as error:
                messages.append(error)
        return messages

    def send(self, message: ToFrontend | Heartbeat) -> bool:
        """Send without waiting.

        Returns:
            False when the front end is so slow that the queue is full; nothing was sent.
        Raises:
            MessageTooLargeError: the message is larger than the link allows.
        """
        raw = encode(message, max_bytes=self._max_message_bytes)
        try:
            self._socket.send(raw, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the connection; what was sent is still delivered, for two seconds at most."""
        self._socket.close()

    def __enter__(self) -> CoreLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _handshake(self, token: str, role: Role, timeout_s: float, protocol_version: int) -> None:
        hello = Hello(protocol_version=protocol_version, token=token, role=role, pid=os.getpid())
        deadline = time.monotonic() + timeout_s
        self._socket.send(encode(hello, max_bytes=self._max_message_bytes))
        if not self._socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
            raise HandshakeError(
                f"ipc.handshake: expected an answer of the front end within {timeout_s} s, got none\n"
                "Fix: see whether the front end still runs"
            )
        reply = decode_hello_reply(self._socket.recv())
        if not reply.accepted:
            raise HandshakeError(
                f"ipc.handshake: refused by the front end (protocol version {reply.protocol_version}): {reply.reason}"
            )
