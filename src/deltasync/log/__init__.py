"""The versions of a feed in a store: read, planned, committed."""
