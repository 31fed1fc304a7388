"""Folders of deltas that slime, Miles, Stitch and others exchange: import them into a feed, export a feed as such.

Needs the extra `interop`. `deltasync.interop.slime` has the function for slime's and Miles' own hook.
"""

from deltasync.interop.exporter import Exported, Exporter
from deltasync.interop.importer import Importer

__all__ = ["Exported", "Exporter", "Importer"]
