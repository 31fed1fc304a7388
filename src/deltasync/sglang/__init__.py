"""SGLang: a server as target, and the loader that its workers call."""

from deltasync.sglang.target import SglangTarget

__all__ = ["SglangTarget"]
