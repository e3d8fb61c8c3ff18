"""The Optuna study that picks plans and records every one as a row."""
