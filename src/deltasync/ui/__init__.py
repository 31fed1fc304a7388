"""A feed at a glance: what a page, a report and a terminal show, from manifests, indexes and heartbeats alone."""
