"""Of several processes of a run one makes the token files, and the others wait for it."""

import os
import subprocess
import sys
from pathlib import Path

from .test_launchers import free_port


def test_two_ranks_tokenize_once(tiny: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(book.read_text() * 200)
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
           "SLURM_JOB_NAME": "books", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    options = ["devices=2", "training.batch_size=2", "training.steps=2", "--out", str(tmp_path / "run")]
    tokenizer = ["text.tokenizer.kind=sentencepiece", "text.tokenizer.vocabulary=300"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "lmlong", "train", str(tiny), *options, *tokenizer],
            env={**os.environ, **job, "OMP_NUM_THREADS": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert "".join(told).count("waiting for process") >= 1
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
