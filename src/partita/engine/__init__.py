"""The event engine: it gives any program its times, and knows nothing of models."""

from partita.engine.events import MODES, evaluate_fifo, evaluate_static, followers, run

__all__ = ["MODES", "evaluate_fifo", "evaluate_static", "followers", "run"]
