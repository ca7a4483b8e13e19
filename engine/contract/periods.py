"""When an engine tells the registry of what changed: for the engine that does, and for those that imitate it."""

BATCH_S = 0.05
"""Changed keys are published within this."""
LOAD_S = 0.1
"""A load that has changed is reported within this: an older one takes an idle pod for a busy one."""
HEARTBEAT_S = 0.5
"""Something is published at least this often."""
