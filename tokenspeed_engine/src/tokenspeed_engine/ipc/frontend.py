"""The front end's end of the link: one ROUTER socket in an asyncio loop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Any

import zmq

from tokenspeed_engine.ipc.errors import LinkBusyError, LinkDownError, ProtocolError
from tokenspeed_engine.ipc.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    HelloReply,
    ToCore,
    ToFrontend,
    decode_hello,
    decode_to_frontend,
    encode,
)

logger = logging.getLogger(__name__)

# Frames handled in one turn of the event loop; the rest waits for the next turn, so that HTTP is never starved.
_FRAMES_PER_TURN = 64
_ROLES = ("data", "heartbeat")


class FrontendLink:
    """Accepts one core at a time, by token, and passes its messages to a handler.

    All methods belong to the event loop's thread. The socket is plain, not zmq.asyncio: an abort must be sent from a `finally`
    block of a cancelled task, where nothing can be awaited.
    """

    def __init__(
        self,
        endpoint: str,
        handler: Callable[[ToFrontend | Heartbeat], None],
        *,
        max_message_bytes: int,
        queue_limit: int,
    ) -> None:
        """Bind the socket; call `start` in the event loop afterwards.

        Args:
            endpoint: an `ipc://` address in a private directory.
            handler: called with each message of the accepted core.
            max_message_bytes: larger messages are neither sent nor received.
            queue_limit: most messages that wait to be taken by the core.
        """
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, queue_limit)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._token = ""
        self._peers: dict[bytes, str] = {}
        self._data_peer: bytes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn_scheduled = False
        self.num_refused = 0

    def start(self) -> None:
        """Begin to receive, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_wakeup)
        self._schedule_turn()

    def new_token(self) -> str:
        """Forget the core that was connected, and expect one with the token that is returned."""
        self._token = secrets.token_hex(32)
        self._peers.clear()
        self._data_peer = None
        return self._token

    @property
    def is_connected(self) -> bool:
        """Whether a core has passed the handshake."""
        return self._data_peer is not None

    def send(self, message: ToCore) -> None:
        """Send to the core, without waiting.

        Raises:
            MessageTooLargeError: the message is larger than the link allows.
            LinkBusyError: the queue is full.  LinkDownError: no core is connected.
        """
        raw = encode(message, max_bytes=self._max_message_bytes)
        if self._data_peer is None:
            raise LinkDownError("ipc.send: no engine core is connected")
        try:
            self._send_raw(self._data_peer, raw)
        except zmq.Again:
            raise LinkBusyError("ipc.send: the queue to the engine core is full") from None
        except zmq.ZMQError as error:
            raise LinkDownError(f"ipc.send: the engine core is gone ({error})") from error

    def close(self) -> None:
        """Stop and release the socket; a second call does nothing."""
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def _send_raw(self, peer: bytes, raw: bytes) -> None:
        self._socket.send_multipart([peer, raw], flags=zmq.NOBLOCK)
        # The descriptor is edge-triggered, and sending may have consumed the edge of a message that came meanwhile.
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled and self._loop is not None:
            self._turn_scheduled = True
            self._loop.call_soon(self._receive_turn)

    def _on_wakeup(self) -> None:
        self._schedule_turn()

    def _receive_turn(self) -> None:
        self._turn_scheduled = False
        for _ in range(_FRAMES_PER_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                # A handler that fails must not keep the messages behind this one from being read.
                logger.exception("ipc.receive: a message of the engine core could not be handled; dropped")
        self._schedule_turn()

    def _on_frames(self, frames: list[Any]) -> None:
        if len(frames) != 2:
            self.num_refused += 1
            logger.warning("ipc.receive: expected 2 frames, got %d; dropped", len(frames))
            return
        peer, raw = frames
        if peer not in self._peers:
            self._on_stranger(peer, raw)
            return
        try:
            message = decode_to_frontend(raw)
        except ProtocolError as error:
            self.num_refused += 1
            logger.error("%s; dropped", error)
            return
        self._handler(message)

    def _on_stranger(self, peer: bytes, raw: bytes) -> None:
        """The handshake: right version, right token, a role that is free."""
        try:
            reason = self._objection(hello := decode_hello(raw))
        except ProtocolError as error:
            hello, reason = None, str(error)
        if hello is not None and not reason:
            self._peers[peer] = hello.role
            if hello.role == "data":
                self._data_peer = peer
        else:
            self.num_refused += 1
            logger.error("ipc.handshake: refused a connection: %s", reason)
        reply = HelloReply(accepted=not reason, protocol_version=PROTOCOL_VERSION, reason=reason)
        try:
            self._send_raw(peer, encode(reply, max_bytes=self._max_message_bytes))
        except zmq.ZMQError as error:
            logger.debug("ipc.handshake: the peer is gone before its answer (%s)", error)

    def _objection(self, hello: Hello) -> str:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version: expected {PROTOCOL_VERSION}, got {hello.protocol_version}. "
                "Fix: run front end and engine core from the same installation"
            )
        if not self._token or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "token: expected the one given to this core at its start, got another. Fix: let the server start its core"
        if hello.role not in _ROLES:
            return f"role: expected one of {', '.join(_ROLES)}, got {hello.role!r}"
        if hello.role in self._peers.values():
            return f"role: {hello.role!r} is taken by another connection"
        return ""
