"""The command `autotune`, also as `python -m autotune`: Ctrl-C ends it in words, also while its modules still load."""

import os
import signal
from types import FrameType

__all__ = ["main"]


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet that would have to be tidied up."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell ignores it for us
        signal.signal(signal.SIGINT, _leave)
    from autotune.cli import main as run

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
