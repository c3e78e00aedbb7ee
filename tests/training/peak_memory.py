"""The command `lmlong`, whose processes write their peak memory in bytes to the files $PEAKS/rank-N."""

import os
from pathlib import Path

import torch

from lmlong.cli.main import main
from lmlong.model.device import peak_memory

if __name__ == "__main__":
    try:
        main()
    finally:
        file = Path(os.environ["PEAKS"]) / f"rank-{os.environ.get('LOCAL_RANK', '0')}"
        file.write_text(str(peak_memory(torch.device("cpu"))))
