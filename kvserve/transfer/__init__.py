"""Moving layers: what to send next (plan, session: pure), moving it (pumps), how (planes)."""
