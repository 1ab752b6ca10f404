"""Chunks on a tree of files: names, publishing, reading."""
