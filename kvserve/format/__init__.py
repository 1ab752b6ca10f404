"""Bytes <-> model, without I/O: chunk files, wire frames, protobuf messages, checksums."""
