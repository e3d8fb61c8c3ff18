"""What the machine lets the campaign do: small disks, folders that can't be written, memory groups. All of it its own.

A mount namespace of its own keeps the mounts away from the rest of the machine; they vanish with the campaign.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MEMORY = Path("/sys/fs/cgroup/memory")


def enter_namespace() -> bool:
    """A mount namespace for this process and its children, before it starts threads; False where that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        return False
    if flags & _CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


def mount_small(folder: Path, size_bytes: int) -> bool:
    """A disk of that size at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "campaign", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    """Take the disk away, also while somebody still looks at it."""
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def without_override() -> list[str]:
    """Words before a command that root runs, so that permissions hold for it; none where they hold anyway."""
    if os.geteuid() != 0:
        return []
    caps = "-dac_override,-dac_read_search"
    words = ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}"]
    with contextlib.suppress(OSError):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    return []


def permissions_hold() -> bool:
    """Whether a folder can be made unwritable for a tuner."""
    return os.geteuid() != 0 or bool(without_override())


def memory_group(name: str, limit_bytes: int) -> str | None:
    """A memory cgroup (version 1 or 2) whose processes may hold so much; None where that is forbidden."""
    for parent, limit in ((_MEMORY, "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = parent / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(limit_bytes))
                # Swap would only put the end off.
                with contextlib.suppress(OSError):
                    (folder / "memory.swappiness").write_text("0")
                return str(folder)
            except OSError:
                folder.rmdir()
    return None


def drop_memory_group(folder: str | None) -> None:
    """Remove the group; its processes are dead."""
    if folder is not None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def clear(folder: Path) -> None:
    """Delete a folder of the campaign, whatever its permissions."""
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
