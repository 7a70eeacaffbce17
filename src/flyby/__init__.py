"""flyby: one-shot federated learning. Every participant's model crosses the wire exactly once."""

__version__ = "0.1.0"
