"""Care of a tree by the command line, with or without servers on it: check, measure, list."""
