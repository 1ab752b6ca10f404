"""Chunk files of every released format version, as bytes: old chunks must open for ever."""
