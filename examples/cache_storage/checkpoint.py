"""``checkpoint.py folder MODEL``: where a model named as at a hub was downloaded to, on standard output.

``checkpoint.py length FOLDER``: the tokens of prompt and answer together that the scripts' instances take: as many as
the checkpoint is made for, and at most those of FastDeploy's own examples, which a laptop has memory for.
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
    """How far the model's positions go, or how far its RoPE is fixed; ``LONGEST`` where the checkpoint does not say."""
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = [config.get("max_position_embeddings")]
    if rope.get("rope_type", rope.get("type")) == "longrope":
        found += [holder.get("original_max_position_embeddings") for holder in (config, rope)]
    return min((length for length in found if isinstance(length, int)), default=LONGEST)


def main() -> None:
    """Print the folder or the length."""
    what, model = sys.argv[1:]
    try:
        if what == "folder":
            print(find_checkpoint(model))
        else:
            print(min(LONGEST, positions(json.loads((Path(model) / "config.json").read_bytes()))))
    except ConfigError as exc:
        sys.exit(f"MODEL_NAME={model}: {exc}")
    except (OSError, ValueError):
        print(LONGEST)  # the instances say in a sentence what is wrong with the checkpoint


if __name__ == "__main__":
    main()
