"""One frozen configuration per stage, and the one reader of flags and environment variables."""

from tokenspeed_engine.config.cache import CacheConfig
from tokenspeed_engine.config.engine import CoreConfig, EngineConfig
from tokenspeed_engine.config.errors import ConfigError
from tokenspeed_engine.config.model import ModelConfig
from tokenspeed_engine.config.process import ProcessConfig
from tokenspeed_engine.config.reader import add_flags, given_flags, read_config
from tokenspeed_engine.config.scheduling import SchedulingConfig
from tokenspeed_engine.config.server import ServerConfig
from tokenspeed_engine.config.tokenizer import TokenizerConfig

__all__ = [
    "CacheConfig",
    "ConfigError",
    "CoreConfig",
    "EngineConfig",
    "ModelConfig",
    "ProcessConfig",
    "SchedulingConfig",
    "ServerConfig",
    "TokenizerConfig",
    "add_flags",
    "given_flags",
    "read_config",
]
