"""Watches what quantizing does to a cache's tiles: ``KVarNCache(monitor=True)``, then ``cache.report()``."""

from kvarn_hf.monitor.log import Monitor, MonitorWarning

__all__ = ["Monitor", "MonitorWarning"]
