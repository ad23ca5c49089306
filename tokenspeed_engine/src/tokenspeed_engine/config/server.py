"""Where the server listens, and what it accepts: the stage of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count, parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one, which is printed.
        served_model_names: names under which the model is served; empty means the model's own.
        api_keys: accepted bearer keys; empty means that none is asked for.
        max_body_bytes: largest request body.
        graceful_shutdown_s: how long running requests may take to end after SIGTERM.
    """

    host: str = option("127.0.0.1", "--host", parse=str, help="address to listen on", metavar="ADDRESS")
    port: int = option(8000, "--port", parse=parse_count, help="TCP port; 0 takes a free one and prints it", metavar="PORT")
    served_model_names: tuple[str, ...] = option(
        (),
        "--served-model-name",
        parse=str,
        repeated=True,
        help="name or names of the model in the API",
        metavar="NAME",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "--api-key",
        parse=str,
        repeated=True,
        environment="TOKENSPEED_API_KEY",
        secret=True,
        help="accepted API key or keys; a flag can be read in the process list, the variable cannot",
        metavar="KEY",
    )
    max_body_bytes: int = option(
        16 * 2**20, "--max-body-bytes", parse=parse_count, help="largest request body, e.g. 16M", metavar="BYTES"
    )
    graceful_shutdown_s: float = option(
        60.0,
        "--timeout-graceful-shutdown",
        parse=parse_seconds,
        help="seconds that running requests may take to end after SIGTERM",
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check(self, "host", bool(self.host.strip()), expected="an address", remedy="use 127.0.0.1, or 0.0.0.0 for all")
        check(self, "port", 0 <= self.port <= 65535, expected="0 to 65535", remedy="use 8000, or 0 for a free port")
        check(
            self,
            "served_model_names",
            all(n.strip() for n in self.served_model_names),
            expected="names that are not empty",
            remedy="leave the flag out to use the model's own name",
        )
        check(
            self,
            "api_keys",
            all(k and k.isascii() and k.isprintable() and " " not in k for k in self.api_keys),
            expected="keys of printable ASCII characters without spaces",
            remedy="choose another key",
        )
        check(self, "max_body_bytes", 1024 <= self.max_body_bytes <= 2**30, expected="1K to 1G bytes", remedy="use 16M")
