"""autotune: a schedule-search autotuner for training large models."""

__version__ = "0.1.0"
