"""``checkpoint.py folder MODEL``: prints the folder to which the model with this hub name was downloaded.

``checkpoint.py length FOLDER``: prints the maximum length (prompt and answer) for the scripts' instances, in tokens. It
is the length that the checkpoint supports, but at most the length in FastDeploy's own examples, for which the memory
of a laptop suffices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvstore_backend import ConfigError
from kvstore_backend.config import find_checkpoint

LONGEST = 32768


def positions(config: dict[str, Any]) -> int:
    """Return the number of positions that the model supports, or ``LONGEST`` if the checkpoint does not have it.

    With ``longrope``, it is the length for which the RoPE is not scaled.
    """
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = [config.get("max_position_embeddings")]
    if rope.get("rope_type", rope.get("type")) == "longrope":
        found += [holder.get("original_max_position_embeddings") for holder in (config, rope)]
    return min((length for length in found if isinstance(length, int)), default=LONGEST)


def main() -> None:
    """Print the folder or the length."""
    command, model = sys.argv[1:]
    try:
        if command == "folder":
            print(find_checkpoint(model))
        else:
            print(min(LONGEST, positions(json.loads((Path(model) / "config.json").read_bytes()))))
    except ConfigError as exc:
        sys.exit(f"MODEL_NAME={model}: {exc}")
    except (OSError, ValueError):
        print(LONGEST)  # the instances report the error in the checkpoint


if __name__ == "__main__":
    main()
