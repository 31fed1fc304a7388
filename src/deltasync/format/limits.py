"""The limits that a reader checks, so that no file can make it allocate or loop without bound."""

BLOCK_ELEMENTS_LOG2 = 25
BLOCK_ELEMENTS_MAX = 1 << BLOCK_ELEMENTS_LOG2
"""Elements that one block may cover."""

CELL_ELEMENTS = 1 << 20
"""Granularity at which a writer may close a block early because many elements changed."""

BLOCK_CHANGES_SOFT = 1 << 19
"""A writer closes a block at the next cell once this many elements changed in it: this bounds memory on both sides."""

PLANES_ELEMENTS = 1 << 22
"""Elements in one dense block of an anchor."""

CLASSES_MAX = 16
"""Classes of old exponents in one block."""

LANES_LOG2_MAX = 5
"""log2 of the number of interleaved rANS states."""

SAFETENSORS_HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors format itself."""

INDEX_BYTES_MAX = 64 << 20
"""Size of a payload's index after decompression."""

MANIFEST_BYTES_MAX = 16 << 20
RECORD_BYTES_MAX = 64 << 10
"""Size of the small JSON objects beside the manifests: feed, floor, lease, heartbeat, pin."""

NOTE_BYTES_MAX = 4096
"""Size of the note of a pin."""

FILES_BYTES_MAX = 256 << 20
"""Size of all files that travel beside the weights."""

TENSORS_MAX = 1 << 20
NAME_BYTES_MAX = 4096
DIMENSIONS_MAX = 16
ELEMENTS_MAX = 1 << 48
"""Elements in one tensor."""

RUNS_MAX = 1 << 22
"""Runs in all blocks of one payload, after strided runs are expanded."""

JSON_VALUES_MAX = 1 << 23
"""Values in one JSON text: parsed JSON takes tens of times the memory of its text."""

JSON_DEPTH_MAX = 64
"""How deeply lists and objects of one JSON text may be nested."""

COUNT_MAX = (1 << 63) - 1
"""Any number of a manifest or record, and any offset in a file."""

VERSION_MAX = COUNT_MAX
