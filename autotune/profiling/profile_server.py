"""The process that profiles stages: `python -m autotune.profiling.profile_server`.

Reads one request a line (JSON) from standard input and answers each with one line on standard output, until the input
ends. A request has `kind` (`passes` or `device`), `key`, `model`, `dtype` and `device`; an answer `record`, or `error`
with `state` (`oom` or `failed`). Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import traceback
from typing import Any

from autotune.profiling.device import Device, make_device
from autotune.profiling.failure import failure_state
from autotune.profiling.profile_records import DeviceKey, PassesKey
from autotune.profiling.solo_world import SoloWorld
from autotune.profiling.stage_profile import measure_device, measure_passes
from autotune.space.model import ModelSpec

__all__ = ["main"]

ERROR_LINES = 6


def main() -> int:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    device: Device | None = None
    world: SoloWorld | None = None
    # Collections between steps look at what steps make, not at the modules of torch.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if device is None or world is None:
                device = make_device(request["device"], 0)
                world = SoloWorld(device.torch_device.type)
            answer: dict[str, Any] = {"record": _measure(request, device, world)}
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
            print("\n".join(lines), file=sys.stderr, flush=True)
            answer = {"state": failure_state(error), "error": "\n".join(lines[-ERROR_LINES:])}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _measure(request: dict[str, Any], device: Device, world: SoloWorld) -> dict[str, Any]:
    model = ModelSpec.from_dict(request["model"])
    if request["kind"] == "passes":
        stages = measure_passes(PassesKey(**request["key"]), model, request["dtype"], device, world)
        return {
            str(depth): {kind: figures.to_dict() for kind, figures in found.items()} for depth, found in stages.items()
        }
    devices = measure_device(DeviceKey(**request["key"]), model, request["dtype"], device, world)
    return {str(depth): dataclasses.asdict(figures) for depth, figures in devices.items()}


if __name__ == "__main__":
    sys.exit(main())
