"""The gRPC edge: servicer (proto <-> model), status mapping, the server process."""
