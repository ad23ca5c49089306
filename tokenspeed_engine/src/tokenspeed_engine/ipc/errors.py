"""What can go wrong between the two processes."""

from __future__ import annotations


class IpcError(Exception):
    """Base of the errors of the link between front end and engine core."""


class ProtocolError(IpcError):
    """A message that cannot be read, or that is not allowed at this point."""


class HandshakeError(IpcError):
    """The other side refused the connection, or did not answer in time."""


class MessageTooLargeError(IpcError):
    """A message is larger than the link allows; it was not sent.

    Attributes:
        size_bytes: size of the message.
        limit_bytes: what the link allows.
    """

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(
            f"ipc.send {what}: expected at most {limit_bytes} bytes, got {size_bytes}\n"
            "Fix: send a smaller request, or raise --max-message-bytes"
        )


class LinkBusyError(IpcError):
    """The queue to the other side is full; try again later."""


class LinkDownError(IpcError):
    """Nobody is connected at the other side."""


class SocketPathError(IpcError):
    """No directory is fit for the private sockets."""
