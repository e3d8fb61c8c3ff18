"""Loaded by every Python that a rank's command starts: writes down what only the process itself can tell.

Python imports a module of this name at start-up; `autotune.profiling.rank_entry` puts this folder on the path. So it
works for any Python worker, unchanged, and costs it a millisecond. The first Python of a rank (others with the same
RANK are its helpers) gets

* `rank-N.failure.json` when an exception ends it: the exception's type tells memory that ran out from other errors;
* `rank-N.stacks`, the stacks of its threads, whenever it gets SIGUSR2: the supervisor asks before it ends a rank that
  hangs. `rank-N.pid` says whom to ask.

A process without a RANK, such as a launcher, is `main`, on other nodes `main-1` and so on. Nothing here may disturb the
worker.
"""

import contextlib
import errno
import faulthandler
import json
import os
import signal
import sys
import time
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ERROR_LINES = 12
_OUT_OF_MEMORY = {"builtins.MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"}
_NO_CONNECTION = {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}
# A disk that is full or gone tells nothing about the plan; `autotune.profiling.failure` has the same list.
_NO_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


def _install() -> None:
    folder, rank = os.environ.get("AUTOTUNE_RANK_FOLDER"), os.environ.get("RANK", "")
    if not folder:
        return
    main = os.environ.get("AUTOTUNE_MAIN", "main")
    base = os.path.join(folder, f"rank-{int(rank)}" if rank.isdigit() else main)
    try:
        claim = os.open(f"{base}.pid", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError:  # the rank has its process already, or the folder is gone
        return
    stacks = open(f"{base}.stacks", "w")  # noqa: SIM115  faulthandler keeps it
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    os.write(claim, str(os.getpid()).encode())
    os.close(claim)
    pid, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Not in a fork; and Ctrl-C is a signal, with which Python ends as if it had none of this.
        if os.getpid() == pid and not issubclass(kind, KeyboardInterrupt):
            with contextlib.suppress(Exception):
                _write(f"{base}.failure.json", _failure(kind, error, trace))
        before(kind, error, trace)

    sys.excepthook = hook


def _failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> dict[str, object]:
    import traceback

    failed_at = time.time()
    lines = "".join(traceback.format_exception(kind, error, trace)).rstrip().splitlines()
    return {
        "state": _state(kind, error),
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "error": "\n".join(lines[-_ERROR_LINES:]),
        "failed_at": failed_at,
        "device": _device(),
    }


def _state(kind: type[BaseException], error: BaseException) -> str:
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    if names & _OUT_OF_MEMORY:
        return "oom"
    # torch's allocator on the CPU has no type of its own: a plain RuntimeError that starts with the source line
    if kind is RuntimeError and str(error).startswith("[enforce fail at alloc_cpu.cpp:"):
        return "oom"
    if isinstance(error, OSError) and error.errno in _NO_DISK:
        return "launcher"
    return "launcher" if names & _NO_CONNECTION else "failed"


def _device() -> str:
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _write(path: str, values: dict[str, object]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(temporary, path)


def _go_on() -> None:
    """Run the module of this name that ours hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    _install()
_go_on()
