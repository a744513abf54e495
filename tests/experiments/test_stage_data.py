"""The data stage of a finetuning run, stopped between any two files, ends with the same files."""

import os
from pathlib import Path

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.mesh import MeshShape
from experiments.finetune.pipeline import FinetuneConfig
from experiments.finetune.presets import Stage
from experiments.finetune.stage_data import prepare_rows, write_demo_conversations

STAGE = Stage(64, 10_000.0, 2e-2, steps=6, batch_tokens=256, warmup_steps=1)


class Killed(BaseException):
    """Ends the process, as far as the code under test can tell."""


def config_of(chats: Path) -> FinetuneConfig:
    conversations = (str(chats),)
    return FinetuneConfig("demo", None, (), conversations, "plain", (STAGE,), None, 0, MeshShape(), (4,))


def test_a_stop_between_any_two_files_changes_nothing(tmp_path, monkeypatch):
    chats = tmp_path / "chats.jsonl"
    write_demo_conversations(chats, count=80)
    tokenizer, _ = prepare_rows(config_of(chats), 300, tmp_path / "undisturbed", None)
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_ids
    renames = stopped = 0
    replace, rename = os.replace, Path.rename

    def counted(original):
        def wrapper(*arguments):
            nonlocal renames
            if renames == stopped:
                raise Killed
            renames += 1
            return original(*arguments)

        return wrapper

    while True:
        folder = tmp_path / f"stopped-{stopped}"
        renames = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted(replace))
            patch.setattr(Path, "rename", counted(rename))
            try:
                prepare_rows(config_of(chats), 300, folder, None)
            except Killed:
                pass
            else:
                break
        again, _ = prepare_rows(config_of(chats), 300, folder, None)
        assert again.digest == tokenizer.digest, f"another tokenizer after a stop at rename {stopped}"
        for split in ("train", "test"):
            files = [run / "rows" / "64" / f"{split}.h5" for run in (folder, tmp_path / "undisturbed")]
            with PackedRows.open(files[0]) as ours, PackedRows.open(files[1]) as theirs:
                assert len(ours) == len(theirs)
        assert Tokenizer.load(folder / "tokenizer").eos_ids == tokenizer.eos_ids
        stopped += 1
    assert stopped > 5
