"""The command line: one file for each command. Results go to stdout, everything else to stderr."""
