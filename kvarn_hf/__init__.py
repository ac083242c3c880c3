"""A KV cache for Hugging Face Transformers that is four to five times smaller."""

from kvarn_hf import attention
from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import PRESETS, KVarNConfig
from kvarn_hf.monitor.log import Monitor, MonitorWarning

attention.register()

__all__ = ["PRESETS", "KVarNCache", "KVarNConfig", "Monitor", "MonitorWarning"]
__version__ = "0.1.0"
