"""Codecs: named, numbered pairs that turn changes into the bytes of a block and back. One file each."""
